"""The fakes and stubs of SGLang against the sources of an installed SGLang, read by AST.

Importing SGLang takes half a minute and packages for GPUs, so that its sources are parsed.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from functools import cache
from pathlib import Path

import pytest
from tests.fleet import sglang_stub
from tests.integrations import sglang_fakes

pytestmark = pytest.mark.skipif(
    "PIGOU_PEER_SGLANG" not in os.environ,
    reason="PIGOU_PEER_SGLANG names no folder: `pip install --no-deps -t DIR sglang`",
)
STORAGE = "srt/mem_cache/hicache_storage.py"
PROTOCOL = "srt/entrypoints/openai/protocol.py"
CHAT = "srt/entrypoints/openai/serving_chat.py"
SERVER = "srt/entrypoints/http_server.py"
METRICS = "srt/observability/metrics_collector.py"
RUNTIME = "srt/runtime_context.py"
CONTROLLER = "srt/managers/cache_controller.py"


@cache
def text(path: str) -> str:
    return (Path(os.environ["PIGOU_PEER_SGLANG"]) / "sglang" / path).read_text()


@cache
def classes(path: str) -> dict[str, ast.ClassDef]:
    tree = ast.walk(ast.parse(text(path)))
    return {node.name: node for node in tree if isinstance(node, ast.ClassDef)}


def methods(node: ast.ClassDef) -> dict[str, list[str]]:
    return {
        item.name: [argument.arg for argument in item.args.args]
        for item in node.body
        if isinstance(item, ast.FunctionDef)
    }


def fields(path: str, name: str) -> set[str]:
    node = classes(path)[name]
    own = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return own.union(*(fields(path, base) for base in bases if base in classes(path)))


def abstract(node: ast.ClassDef) -> set[str]:
    return {
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod"
                for mark in item.decorator_list)
    }  # fmt: skip


def test_the_backend_has_every_method_that_the_controller_calls() -> None:
    with sglang_fakes.fake_sglang():
        from pigou.integrations.sglang import PigouStorage

        theirs = classes(STORAGE)["HiCacheStorage"]
        assert abstract(theirs) == sglang_fakes.HiCacheStorage.__abstractmethods__
        assert not PigouStorage.__abstractmethods__
        called = {"register_mem_pool_host", "register_mem_host_pool_v2", "batch_exists",
                  "on_host_pools_registered", "batch_exists_v2", "batch_get_v2", "batch_set_v2",
                  "batch_get_v1", "batch_set_v1", "batch_get", "batch_set", "clear"}  # fmt: skip
        own = PigouStorage.__dict__
        for name in called:
            wanted = [each for each in methods(theirs)[name] if each != "target_sizes"]
            code = own[name].__code__
            names = list(code.co_varnames[: code.co_argcount])
            assert names == wanted[: len(names)], name
    assert "(storage_config, kwargs)" in text("srt/mem_cache/storage/backend_factory.py")


@pytest.mark.parametrize(
    "name",
    ["PoolTransfer", "PoolTransferResult", "HiCacheStorageExtraInfo", "HiCacheStorageConfig"],
)
def test_fakes_have_fields_of_theirs_alone(name: str) -> None:
    own = {field.name for field in dataclasses.fields(getattr(sglang_fakes, name))}
    assert own <= fields(STORAGE, name)


def test_the_page_hashes_begin_with_salt_and_extra_key() -> None:
    seed = methods_text("srt/mem_cache/utils.py", "storage_namespace_seed")
    assert "for part in (extra_key, cache_salt)" in seed
    query = methods_text(CONTROLLER, "_storage_hit_query")
    assert "get_storage_hash_str(" in query
    assert "batch_exists(batch_hashes, extra_info)" in query


def methods_text(path: str, name: str) -> str:
    for node in ast.walk(ast.parse(text(path))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
    raise AssertionError(f"{path} has no {name}")


def test_the_zero_copy_interface_is_that_of_interface_v1() -> None:
    attach = methods_text(CONTROLLER, "attach_storage_backend")
    assert "'interface_v1', 0" in attach
    assert "page_get_func = self._page_get_zero_copy" in attach


def test_requests_have_the_fields_that_the_gateway_sends() -> None:
    legs = set(sglang_stub.BOOTSTRAP)
    sent = legs | {"return_token_ids", "cache_salt", "stream", "lora_path"}
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert sent <= fields(PROTOCOL, name)
    assert "return_token_ids is not supported with streaming" in text(CHAT)
    assert {"token_ids", "prompt_token_ids"} <= fields(PROTOCOL, "CompletionResponseStreamChoice")
    assert 'owned_by: str = "sglang"' in text(PROTOCOL)
    assert "req.sampling_params.max_new_tokens = 1" in text("srt/disaggregation/prefill.py")


@pytest.mark.parametrize("path", ["/health", "/server_info", "/v1/models", "/v1/completions",
                                  "/v1/chat/completions", "/tokenize"])  # fmt: skip
def test_routes_are_there(path: str) -> None:
    assert f'"{path}"' in text(SERVER)


def test_metrics_and_events_have_their_names() -> None:
    for name in (sglang_stub.RUNNING, sglang_stub.WAITING, sglang_stub.USAGE,
                 "sglang:inter_token_latency_seconds", "sglang:cached_tokens_total"):  # fmt: skip
        assert f'"{name}"' in text(METRICS), name
    described = methods_text(RUNTIME, "describe_kv_events_publisher")
    for key in ("endpoint_host", "endpoint_port_base", "topic", "block_size", "dp_size",
                "replay_endpoint_port_base"):  # fmt: skip
        assert f"'{key}'" in described
    stored = fields("srt/disaggregation/kv_events.py", "BlockStored")
    assert {"block_hashes", "parent_block_hash", "token_ids", "block_size", "medium",
            "cache_salt", "lora_name"} <= stored  # fmt: skip
