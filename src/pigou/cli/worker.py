"""`pigou worker`."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
import typer

from pigou.cli.options import names, typed
from pigou.cli.ports import check_port
from pigou.config import ConfigError, EvictionConfig, wrong
from pigou.extras import require
from pigou.imports import uncollected
from pigou.logs import LogFormat, LogLevel
from pigou.request import Role
from pigou.worker.config import WorkerConfig

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_DEFAULT = WorkerConfig()
_OPTIONS = {
    **names(WorkerConfig, eviction_params="eviction_param", eviction_floors="eviction_floor"),
    **{f"eviction.{name}": f"--eviction-{name}" for name in EvictionConfig.__struct_fields__},
}


def parse_size(text: str) -> int:
    """Return the bytes that a size like `512MiB` or `2G` means (powers of 1,024)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write for example 512MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def worker(
    model: Annotated[
        str, typer.Option(help="Folder, Hugging Face hub id, or 'bundled'.")
    ] = _DEFAULT.model,
    served_model_name: Annotated[
        str, typer.Option(help="Name that requests use; by default the model's own.")
    ] = "",
    role: Annotated[Role, typer.Option(help="What the fleet asks it to do.")] = _DEFAULT.role,
    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(help="Its port; 0 takes a free one.")] = _DEFAULT.port,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = _DEFAULT.device,
    dtype: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = _DEFAULT.dtype,
    threads: Annotated[int, typer.Option(help="Compute threads.")] = _DEFAULT.threads,
    blocks: Annotated[
        int, typer.Option(help="KV blocks; 0 takes as many as fit --memory.")
    ] = _DEFAULT.blocks,
    memory: Annotated[
        str, typer.Option(help="Memory for KV blocks, like 512MiB; 0 chooses by the device.")
    ] = "0",
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = _DEFAULT.block_size,
    host_blocks: Annotated[
        int, typer.Option(help="Blocks of host memory that preempted requests may be swapped to.")
    ] = _DEFAULT.host_blocks,
    host_cache: Annotated[
        str, typer.Option(help="Host memory for blocks that leave the device, like 4GiB.")
    ] = "0",
    disk_cache: Annotated[
        str, typer.Option(help="Disk space for blocks, with --disk-path, like 100GiB.")
    ] = "0",
    disk_path: Annotated[
        str, typer.Option(help="Folder for them, of this worker alone.")
    ] = _DEFAULT.disk_path,
    bucket_cache: Annotated[
        str, typer.Option(help="Room for blocks in an object storage, with --bucket-url.")
    ] = "0",
    bucket_url: Annotated[
        str, typer.Option(help="The object storage, as s3://BUCKET/PREFIX.")
    ] = _DEFAULT.bucket_url,
    bucket_endpoint: Annotated[
        str, typer.Option(help="Of an S3-compatible server; by default AWS_ENDPOINT_URL's.")
    ] = _DEFAULT.bucket_endpoint,
    bucket_region: Annotated[
        str, typer.Option(help="Of an S3 bucket; by default what the environment says.")
    ] = _DEFAULT.bucket_region,
    tier_policy: Annotated[
        str, typer.Option(help="What these caches give up first: price, lru, arc, ...")
    ] = _DEFAULT.tier_policy,
    tier_recall: Annotated[
        bool, typer.Option(help="Bring back what a session needs before it is expected.")
    ] = _DEFAULT.tier_recall,
    eviction: Annotated[
        str,
        typer.Option(
            help="Policy by which running requests give up cache entries when blocks run short: "
            "pigou, h2o, snapkv, ...; by default none does, and requests are preempted."
        ),
    ] = _DEFAULT.eviction,
    eviction_param: Annotated[
        list[str] | None, typer.Option(help="Parameter of that policy, as NAME=VALUE; repeatable.")
    ] = None,
    eviction_sinks: Annotated[
        int, typer.Option(help="First tokens of a request that are never given up.")
    ] = _DEFAULT.eviction_sinks,
    eviction_recent: Annotated[
        int, typer.Option(help="Last tokens of a request that are never given up.")
    ] = _DEFAULT.eviction_recent,
    eviction_least: Annotated[
        int, typer.Option(help="Fewest cache entries that a request keeps.")
    ] = _DEFAULT.eviction_least,
    eviction_interval: Annotated[
        int, typer.Option(help="Tokens after which a request's entries are appraised again.")
    ] = _DEFAULT.eviction_interval,
    eviction_ceiling: Annotated[
        float,
        typer.Option(
            help="Highest loss of return per block, in the policy's unit; beyond it requests wait "
            "or are preempted."
        ),
    ] = _DEFAULT.eviction_ceiling,
    eviction_slack: Annotated[
        float,
        typer.Option(help="Blocks given up beyond what is needed, for each running request."),
    ] = _DEFAULT.eviction_slack,
    eviction_rate: Annotated[
        float, typer.Option(help="Learning rate of the price of a block.")
    ] = _DEFAULT.eviction_rate,
    eviction_floor: Annotated[
        list[str] | None,
        typer.Option(help="Blocks a tenant's requests keep, as TENANT=BLOCKS; repeatable."),
    ] = None,
    max_seqs: Annotated[
        int, typer.Option(help="Most sequences that run at once.")
    ] = _DEFAULT.max_seqs,
    max_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens computed in one step.")
    ] = _DEFAULT.max_batched_tokens,
    max_background_tokens: Annotated[
        int,
        typer.Option(
            help="Of those, most tokens of prompts whose priority is above 0; 0 for no limit."
        ),
    ] = _DEFAULT.max_background_tokens,
    max_model_len: Annotated[
        int, typer.Option(help="Most tokens of a sequence; 0 for the model's context.")
    ] = _DEFAULT.max_model_len,
    max_waiting: Annotated[
        int, typer.Option(help="Most requests that may wait; 0 for no limit.")
    ] = _DEFAULT.max_waiting,
    order: Annotated[
        str,
        typer.Option(
            help="Who is admitted first: fcfs, priority or edf; with priority, prompts of a lower "
            "number overtake what was begun."
        ),
    ] = _DEFAULT.order,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep finished blocks for requests with the same prefix.")
    ] = _DEFAULT.prefix_caching,
    repeat: Annotated[
        int, typer.Option(help="Most steps that are planned at once.")
    ] = _DEFAULT.repeat,
    kv_events: Annotated[bool, typer.Option(help="Publish KV events.")] = _DEFAULT.kv_events,
    kv_events_endpoint: Annotated[
        str, typer.Option(help="ZMQ address that KV events are published on.")
    ] = _DEFAULT.kv_events_endpoint,
    kv_replay_endpoint: Annotated[
        str, typer.Option(help="ZMQ address that past KV events can be asked for on.")
    ] = _DEFAULT.kv_replay_endpoint,
    kv_transfer: Annotated[
        str, typer.Option(help="How blocks move between workers: auto, shm, tcp or none.")
    ] = _DEFAULT.kv_transfer,
    kv_lease: Annotated[
        float, typer.Option(help="Seconds for which offered blocks are kept.")
    ] = _DEFAULT.kv_lease,
    json_whitespace: Annotated[
        str,
        typer.Option(
            help="White space of structured JSON: compact writes none between its parts, flexible "
            "lets the model choose. A request may say otherwise."
        ),
    ] = _DEFAULT.json_whitespace,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help="Format of the tool calls that the model makes of its own accord: hermes, "
            "llama3_json, mistral, none, or auto for what its chat template asks for."
        ),
    ] = _DEFAULT.tool_call_parser,
    fleet_secret_file: Annotated[
        str,
        typer.Option(
            help="File with the secret that whoever speaks to this worker must know; by default "
            "PIGOU_FLEET_SECRET of the environment, or none."
        ),
    ] = _DEFAULT.fleet_secret_file,
    allow_special_tokens: Annotated[
        bool,
        typer.Option(
            help="Let special tokens that clients type in chats become control tokens, as vLLM "
            "does; by default they stay text."
        ),
    ] = _DEFAULT.allow_special_tokens,
    allow_open: Annotated[
        bool, typer.Option(help="Listen beyond loopback although there is no fleet secret.")
    ] = _DEFAULT.allow_open,
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "16MiB",
    unknown_fields: Annotated[
        str,
        typer.Option(
            help="Fields of requests that are unknown: warn (log once, name them in a header of "
            "the reply) or refuse."
        ),
    ] = _DEFAULT.unknown_fields,
    drain: Annotated[
        float, typer.Option(help="Seconds that requests in flight are given after SIGTERM.")
    ] = _DEFAULT.drain,
    rehearse: Annotated[
        float,
        typer.Option(
            help="Seconds in which it may measure its own speed before it is ready; 0 for none."
        ),
    ] = _DEFAULT.rehearse,
    log_format: Annotated[LogFormat, typer.Option(help="Of the lines on stderr.")] = "text",
    log_level: Annotated[LogLevel, typer.Option(help="Least level of them.")] = _DEFAULT.log_level,
    access_log: Annotated[
        bool,
        typer.Option(
            help="Log each request once it is answered: status, tenant, tokens, times; never "
            "prompts or keys."
        ),
    ] = False,
    exit_with_parent: Annotated[
        bool, typer.Option(help="End when the process that started this one is gone.")
    ] = _DEFAULT.exit_with_parent,
    executor: Annotated[
        str, typer.Option(help="torch, or sleep: no model, time by a law, made-up tokens.")
    ] = _DEFAULT.executor,
    timing: Annotated[
        str,
        typer.Option(
            help="Sleep in place of computing, as `pigou simulate --timing` says: roofline, "
            "profile:FOLDER, law:KEY=VALUE,..., or FILE.json of `pigou profile`"
        ),
    ] = _DEFAULT.timing,
    timing_model: Annotated[
        str, typer.Option(help="For --timing: whose times; by default those of --model.")
    ] = _DEFAULT.timing_model,
    timing_gpu: Annotated[
        str, typer.Option(help="For --timing roofline and profile: the GPU.")
    ] = _DEFAULT.timing_gpu,
    timing_tp: Annotated[
        int, typer.Option(help="For --timing: GPUs that share the model.")
    ] = _DEFAULT.timing_tp,
    timing_link: Annotated[
        str,
        typer.Option(
            help="For --timing: the link that KV blocks come over, as gbps=400,latency_us=200; "
            "by default it takes no time."
        ),
    ] = _DEFAULT.timing_link,
    sleep_base: Annotated[
        int, typer.Option(help="For --executor sleep: nanoseconds of a step.")
    ] = _DEFAULT.sleep_base,
    sleep_per_seq: Annotated[
        int, typer.Option(help="For --executor sleep: nanoseconds more per decoding sequence.")
    ] = _DEFAULT.sleep_per_seq,
    sleep_prefill_rate: Annotated[
        float, typer.Option(help="For --executor sleep: prompt tokens computed in a second.")
    ] = _DEFAULT.sleep_prefill_rate,
) -> None:
    """Run one worker: an OpenAI-compatible server over one model."""
    values = dict(locals())
    for name in ("memory", "max_body", "host_cache", "disk_cache", "bucket_cache"):
        values[name] = parse_size(values[name])
    for option, name in (("eviction_param", "eviction_params"),
                         ("eviction_floor", "eviction_floors")):  # fmt: skip
        values[name] = _numbers(option, values.pop(option) or [])
    try:
        check_port(host, port)
        config = msgspec.convert(values, WorkerConfig)
        if not config.sleeps:
            require("worker", "a worker that computes")
        with uncollected():
            from pigou.worker.process import run

        status = run(config)
    except msgspec.ValidationError as error:
        typer.echo(f"pigou worker: {typed(wrong(error, WorkerConfig, values), _OPTIONS)}", err=True)
        raise typer.Exit(2) from None
    except ConfigError as error:
        typer.echo(f"pigou worker: {typed(str(error), _OPTIONS)}", err=True)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        typer.echo(f"pigou worker: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)


def _numbers(option: str, given: list[str]) -> dict[str, float]:
    """Return what `NAME=NUMBER`, given repeatedly, says."""
    found: dict[str, float] = {}
    for each in given:
        name, equals, value = each.partition("=")
        try:
            found[name] = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            equals = ""
        if not name or not equals:
            flag = "--" + option.replace("_", "-")
            raise typer.BadParameter(f"{flag} {each!r} is not NAME=NUMBER")
    return found
