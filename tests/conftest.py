"""What several test folders share: fixtures, and how asynchronous tests are run."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings
from tests.lib.examples import ALL
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Read by torch and NumPy once they are imported: threads that wait for each other by spinning
# would fill two cores with nothing. Tests of several threads set their number themselves.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# What compiles at its first call, or runs beside others, takes what it takes.
# `make test` tries few examples, the same each time, so that a failure is the change's own;
# `make explore` tries all, and new ones. Counts of a test are scaled by `examples`.
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=ALL // 10)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=ALL)
settings.load_profile("fast")

# Nothing that is made while tests are collected is garbage worth looking for.
gc.disable()

#: Control tokens of the tokenizer of `model_folder`; their ids are 0 to 3.
SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role is ' + message['role']) }}{% endif %}"
    "{{ '<|user|>' if message['role'] != 'assistant' else '<|assistant|>' }}"
    "{{ message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Hello world, hello there!",
    "Zażółć gęślą jaźń. Ünïcödé. 日本語の文字列と絵文字 😀🎉👩‍👩‍👧.",
    "one two three four five six seven eight nine ten stop here STOP",
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with a small byte-level tokenizer and no weights; context 2,048."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": {"content": SPECIAL[1], "special": True},
        "chat_template": TEMPLATE,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": backend.get_vocab_size(),
        "max_position_embeddings": 2048,
        "eos_token_id": 1,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WARM_UP = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin to compile all kernels before `-n` starts its processes, which load what is there."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        argv = [sys.executable, "-m", "pigou", "warm"]
        config.stash[WARM_UP] = subprocess.Popen(argv, stdout=subprocess.DEVNULL)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Wait for the kernels of a session that was over before they were compiled."""
    if (warm_up := session.config.stash.get(WARM_UP, None)) is not None:
        warm_up.wait()


#: Folders whose tests start fleets of processes, which fill the cores: one test at a time.
FLEETS = ("tests/e2e/", "tests/hostile/", "tests/peers/")


class FileScheduling(LoadScopeScheduling):
    """Gives each process of `-n` whole files, so that fixtures of a module are made once.

    Tests that start fleets are one unit: they run one after another, beside the others.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "fleets" if nodeid.startswith(FLEETS) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Schedule by files: marks of groups are lost on the nodes of pytest 9.2."""
    return FileScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that start fleets first, since together they take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(FLEETS))


def pytest_collection_finish() -> None:
    """Leave a million objects of imported modules and collected tests out of later collections.

    With them, each `gc.collect` of a test would take a second.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Leave what the files before made, and keep, out of the collections of a file.

    Compiled kernels and lazy imports are millions of objects: a `gc.collect` of the last files
    would take seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own, of the gateway's kind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120))
    return True
