"""Options in groups, as the help of a command shows them."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

#: Command -> group -> options, in the order of the help; others come last.
GROUPS: dict[str, dict[str, str]] = {
    "serve": {
        "Model and workers": "model served_model_name tokenizer prefill decode both device dtype "
        "threads kv_transfer timing attach",
        "Gateway": "host port api_keys_file allow_open max_body unknown_fields client_timeout "
        "hang_timeout drain release journal open_metrics",
        "Routing": "policy temperature softmax controller detector peer_reads index_max_blocks "
        "index_max_total index_ttl",
        "Admission": "admission tenant_weights max_queued max_queued_tokens max_inflight "
        "max_request_inflight max_inflight_tokens prefill_ahead queue_timeout",
        "Logs": "log_format log_level access_log verbose",
    },
    "worker": {
        "Model": "model served_model_name role device dtype threads",
        "Server": "host port max_body unknown_fields json_whitespace drain exit_with_parent",
        "KV memory": "blocks memory block_size host_blocks prefix_caching host_cache disk_cache "
        "disk_path bucket_cache bucket_url bucket_endpoint bucket_region tier_policy tier_recall",
        "Token eviction": "eviction eviction_param eviction_sinks eviction_recent eviction_least "
        "eviction_interval eviction_ceiling eviction_slack eviction_rate eviction_floor",
        "Scheduling": "max_seqs max_batched_tokens max_background_tokens max_model_len max_waiting "
        "order repeat rehearse",
        "KV transfer and events": "kv_transfer kv_lease kv_events kv_events_endpoint "
        "kv_replay_endpoint",
        "Timing in place of a model": "executor timing timing_model timing_gpu timing_tp "
        "timing_link sleep_base sleep_per_seq sleep_prefill_rate",
        "Logs": "log_format log_level access_log",
    },
    "bench": {
        "Endpoint": "model api_key chat timeout",
        "Load": "concurrency rate cv max_inflight requests duration warmup seed",
        "Prompts": "input output ignore_eos text prefixes prefix_length",
        "Trace": "trace trace_scale trace_speed sessions",
        "Results": "json",
    },
    "simulate": {
        "Load": "workload seed",
        "Fleet": "fleet model gpu tp timing engine blocks tier tier_recall max_batched_tokens "
        "max_seqs max_model_len rehearses",
        "Routing": "policy temperature controller detector peer_reads",
        "Admission": "admission max_inflight max_inflight_tokens max_queued queue_timeout",
        "Results": "json report",
    },
}
_OTHERS = "Options"


def group_of(command: str, option: str) -> str:
    """Return the heading that an option stands under."""
    for group, options in GROUPS.get(command, {}).items():
        if option in options.split():
            return group
    return _OTHERS


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups, in plain text of the terminal's width."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the groups of options."""
        headings = ("Arguments", *GROUPS.get(self.name or "", {}), _OTHERS)
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in headings}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            argument = parameter.param_type_name == "argument"
            name = parameter.name or ""
            group = "Arguments" if argument else group_of(self.name or "", name)
            groups[group].append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)
