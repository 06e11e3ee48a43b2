"""Simulated fleets that a word does not describe: as the YAML files of `pigou simulate --fleet`."""

from __future__ import annotations

from typing import Any

Fleet = dict[str, Any]

FLEETS: dict[str, Fleet] = {
    "mixed_gpus": {"workers": [
        {"role": "both", "gpu": "H100", "count": 2}, {"role": "both", "gpu": "A100", "tp": 2},
        {"role": "both", "gpu": "L40S", "max_seqs": 32},
    ]},
    "mixed_gpus_split": {
        "workers": [
            {"role": "prefill", "gpu": "H200", "count": 2},
            {"role": "decode", "gpu": "H100", "count": 2}, {"role": "decode", "gpu": "A100"},
        ],
        "link": {"gbps": 50.0, "latency_us": 500.0},
    },
    "mixed_roles": {"workers": [
        {"role": "prefill"}, {"role": "decode", "count": 2}, {"role": "both", "count": 2},
    ]},
    "killed": {
        "workers": [
            {"role": "both", "fails": [{"start": 4.0, "end": 9.0}]},
            {"role": "both", "fails": [{"start": 6.0, "end": 7.0}, {"start": 12.0, "end": 15.0}]},
            {"role": "both", "count": 2},
        ],
        "detect_ms": 300.0,
    },
    "killed_split": {
        "workers": [
            {"role": "prefill", "fails": [{"start": 5.0, "end": 8.0}]}, {"role": "prefill"},
            {"role": "decode", "fails": [{"start": 3.0, "end": 10.0}]},
            {"role": "decode", "count": 2},
        ],
        "detect_ms": 500.0, "lease_s": 2.0, "overhead_ms": 1.0, "leg_ms": 2.0,
    },
    "lost_for_good": {"workers": [
        {"role": "decode", "fails": [{"start": 5.0}]}, {"role": "decode", "starts": 8.0},
        {"role": "decode"}, {"role": "prefill", "fails": [{"start": 10.0}]},
    ]},
    "slow": {"workers": [
        {"role": "both", "slow": [{"factor": 3.0, "start": 3.0, "end": 9.0}]},
        {"role": "both", "slow": [{"factor": 1.3}]}, {"role": "both", "starts": 5.0},
        {"role": "both"},
    ]},
    "stale": {
        "workers": [{"role": "both", "count": 4}],
        "signals": {"event_delay_ms": 200.0, "event_loss": 0.2, "replay": True,
                    "report_every_ms": 500.0, "report_delay_ms": 300.0, "report_loss": 0.3},
    },
    "forgetful": {
        "workers": [{"role": "prefill"}, {"role": "decode", "count": 2},
                    {"role": "both", "events": False}],
        "signals": {"event_delay_ms": 20.0, "event_loss": 0.3, "replay": False,
                    "report_every_ms": 0.0},
    },
    "fifo_receiver": {
        "workers": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 3}],
        "link": {"gbps": 20.0, "latency_us": 1000.0, "sharing": "fifo", "ends": "receiver"},
    },
    "no_bandwidth": {
        "workers": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 2}],
        "link": {"gbps": 0.0, "latency_us": 5000.0},
    },
    "uncached": {"workers": [
        {"role": "both", "count": 2, "prefix_caching": False, "block_size": 32},
        {"role": "both", "block_size": 32, "max_batched_tokens": 512},
    ]},
    "tiers_each": {"workers": [
        {"role": "both", "blocks": 1200,
         "tiers": [{"name": "host", "gib": 0.4, "policy": "arc"}]},
        {"role": "both", "blocks": 1200, "tiers": [
            {"name": "host", "gib": 0.2, "gbps": 100, "policy": "lru"},
            {"name": "disk", "gib": 1.0, "gbps": 16, "latency_us": 200, "policy": "price"}]},
        {"role": "both", "blocks": 1200, "fails": [{"start": 12.0, "end": 14.0}],
         "tiers": [{"name": "disk", "gib": 1.0, "gbps": 16, "policy": "sieve"}]},
    ]},
}  # fmt: skip
