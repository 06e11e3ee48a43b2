"""Definitions of the 19 failure modes; their detectors are in `pigou.diagnosis.diagnose`."""

from __future__ import annotations

from pigou.diagnosis.mode import FailureMode

#: Label of requests for work: probes and pages are counted beside them.
_WORK = 'route=~"/v1/completions|/v1/chat/completions|other"'
#: Layers whose hits are answers; waits of short prompts; lengths of begun ones.
_ANSWERS = '{{layer=~"answer|semantic"}}'
_SHORT = 'pigou_prompt_wait_seconds_bucket{{length="short"}}'
_BEGUN = "pigou_prompt_begun_tokens_bucket"
_MODES = (
    FailureMode(
        number=1, name="out of memory",
        symptom="A worker dies, and its streams migrate or break.",
        cause="Activations of long prompts, or adapters, need more memory than the KV pool leaves.",
        signal="The kernel killed a worker for want of memory, or its allocator failed, once.",
        smallest_fix="Give the KV pool a smaller share (--memory, --blocks), or "
        "cap the length of prompts (--max-model-len).",
        remedy="A profile run of the longest prompt when a worker starts.",
        look=("GET /workers: `last_end` of the worker that was restarted.",
              "The last lines of its log; `dmesg` for the kernel's killer.",
              "The longest prompts before its death (GET /decisions)."),
        follows=(6, 13),
        alert="increase(pigou_worker_out_of_memory_total[10m]) > 0", alert_for="0m",
    ),
    FailureMode(
        number=2, name="KV exhaustion",
        symptom="Streams stall in the middle and go on later; latency has spikes.",
        cause="More and longer sequences run than the block pool holds: they preempt each other.",
        signal="KV usage of a worker over {kv_usage:.0%} and preemptions, for {seconds:.0f} s.",
        limits={"kv_usage": 0.9, "seconds": 20},
        smallest_fix="Lower the running cap (--max-seqs, --max-inflight-tokens) until preemptions "
        "stop; admit by predicted outputs (--lengths online).",
        remedy="More KV memory.",
        look=("`vllm:num_preemptions_total` and `vllm:kv_cache_usage_perc` of each worker.",
              "Lengths of outputs: did they grow?",
              "Whether one tenant holds the pool (mode 11)."),
        follows=(6, 10, 13),
        alert="vllm:kv_cache_usage_perc > {kv_usage} and rate(vllm:num_preemptions_total[2m]) > 0",
    ),
    FailureMode(
        number=3, name="cache fragmentation",
        symptom="The batch is smaller than the memory allows.",
        cause="Contiguous allocators leave gaps; blocks that are large beside the sequences leave "
        "their ends empty.",
        signal="Room in used blocks over {waste:.0%} of the pool for {seconds:.0f} s, or "
        "allocations that fail with over {free:.0%} free.",
        limits={"waste": 0.04, "free": 0.1, "seconds": 30},
        smallest_fix="Restart the worker (contiguous allocators), or give it smaller paged blocks "
        "(--block-size 16).",
        look=("Block size beside the mean length of sequences.",
              "`pigou_kv_blocks` and `pigou_kv_blocks_free` beside the tokens held."),
    ),
    FailureMode(
        number=14, name="tool-wait amplification",
        symptom="Agents get slower together; the pool is full while little is computed.",
        cause="Sequences keep their KV while their tools run.",
        signal="KV that nothing computed with for over 5 s fills over {idle:.0%} of a pool, for "
        "{seconds:.0f} s.",
        limits={"idle": 0.2, "seconds": 30},
        smallest_fix="Release on wait: end requests at the tool call "
        "(`parallel_tool_calls: false`), and let a tier bring KV back (--tier host=SIZE); "
        "shorten the lease (--kv-lease).",
        look=("`pigou_kv_idle_tokens` of each worker, by tenant; `pigou_kv_requests_held`.",
              "KV usage beside running requests: full with nothing running is held."),
        follows=(2, 4, 6),
        alert=(
            "sum by (instance, worker) (pigou_kv_idle_tokens) > {idle} * "
            "sum by (instance, worker) (pigou_kv_blocks * pigou_kv_block_tokens)"
        ),
    ),
    FailureMode(
        number=15, name="adapter memory pressure",
        symptom="The first token of some adapters takes long.",
        cause="More adapters are in use than fit: they push each other out.",
        signal="Over {loads} adapter loads a second, each over {share:.0%} of the median TTFT, for "
        "{seconds:.0f} s.",
        limits={"loads": 0.1, "share": 0.1, "seconds": 30},
        smallest_fix="Pin the adapters in use; place them by use (--place-adapters).",
        look=("`pigou_lora_loads_total` and `vllm:lora_adapter_loaded` of each worker.",
              "`vllm:lora_requests_info`: adapters that run and wait; `max_lora`: its slots."),
        alert="rate(pigou_lora_loads_total[5m]) > {loads} and "
        "rate(pigou_lora_load_seconds_total[5m]) / rate(pigou_lora_loads_total[5m]) > "
        "on () group_left () {share} * histogram_quantile(0.5, "
        "sum by (le) (rate(pigou_time_to_first_token_seconds_bucket[5m])))",
    ),
    FailureMode(
        number=16, name="offload collapse",
        symptom="Cache hits make requests slower.",
        cause="KV comes back from a tier more slowly than it could be computed anew.",
        signal="Over {slow:.0%} of at least {reads:.0f} reads from tiers in {seconds:.0f} s slower "
        "than to recompute.",
        limits={"slow": 0.1, "reads": 10, "seconds": 30},
        smallest_fix="Stop offloading: take the slowest tier out.",
        remedy="A faster link: Pigou restores only what is quicker than to recompute.",
        look=("`pigou_tier_queued_blocks`: reads that wait for the link.",
              "`pigou_tier_restored_blocks_total` beside TTFT."),
        follows=(6, 10),
        alert="rate(pigou_tier_restored_blocks_total[5m]) > 0 and pigou_tier_queued_blocks > 1000",
        alert_for="5m",
    ),
    FailureMode(
        number=4, name="prefix-miss storm",
        symptom="TTFT of all rises at once; requests a second do not.",
        cause="A change in the template, or volatile text at its head, makes every prompt new.",
        signal="The hit ratio of {seconds:.0f} s under {drop:.0%} of the hour's before, prefill "
        "tokens a second over {prefill} times, requests a second under {requests} times, "
        "{count:.0f} requests at least.",
        limits={"drop": 0.5, "prefill": 1.5, "requests": 1.5, "known": 0.1, "count": 30,
                "seconds": 30},
        smallest_fix="Freeze the template, and move what changes behind what does not: "
        "`pigou diagnose --prefixes TRACE` and the header `x-pigou-prefix-advice` name it; "
        "--cache context=SIZE orders the parts.",
        look=("`pigou diagnose --prefixes JOURNAL`.", "What was released when the ratio fell.",
              "Whether workers were restarted: their caches were empty then.",
              "`pigou_session_blocks_retained_total` beside `pigou_session_blocks_returned_total`: "
              "a pool too small for paused sessions loses blocks as well (--tier host=SIZE)."),
        follows=(6, 7, 18),
        alert="sum(rate(vllm:prefix_cache_hits_total[5m])) / "
        "sum(rate(vllm:prefix_cache_queries_total[5m])) < {drop} * "
        "sum(rate(vllm:prefix_cache_hits_total[1h])) / "
        "sum(rate(vllm:prefix_cache_queries_total[1h])) and "
        "sum(rate(vllm:prefix_cache_hits_total[1h])) / "
        "sum(rate(vllm:prefix_cache_queries_total[1h])) > {known} and "
        "sum(rate(vllm:prefix_cache_queries_total[5m])) < {requests} * "
        "sum(rate(vllm:prefix_cache_queries_total[1h]))",
    ),
    FailureMode(
        number=5, name="semantic-cache staleness",
        symptom="Answers are out of date, or wrong.",
        cause="Entries outlive the sources they were made from; similar is taken for the same.",
        signal="Over {stale:.0%} of at least {answers:.0f} cached answers older than their "
        "sources, or over {disliked:.0%} of as many judged answers disliked.",
        limits={"stale": 0.05, "disliked": 0.2, "answers": 20},
        smallest_fix="Void entries (POST /v1/manifest); raise `threshold` of "
        "--cache semantic=SIZE; bind entries to their sources (header X-Pigou-Tenure-Corpus).",
        look=("`pigou_cache_stale_hits_total` beside `pigou_cache_hits_total`; "
              "`pigou_answer_ratings_total`.",
              "The release of the corpus beside the age of entries."),
        alert=(
            f"sum(increase(pigou_cache_stale_hits_total{_ANSWERS}[1h])) > {{stale}} * "
            f"sum(increase(pigou_cache_hits_total{_ANSWERS}[1h])) and "
            f"sum(increase(pigou_cache_hits_total{_ANSWERS}[1h])) >= {{answers}} or "
            'sum(increase(pigou_answer_ratings_total{{rating="down"}}[1h])) > {disliked} * '
            "sum(increase(pigou_answer_ratings_total[1h])) and "
            "sum(increase(pigou_answer_ratings_total[1h])) >= {answers}"
        ),
    ),
    FailureMode(
        number=11, name="noisy neighbour",
        symptom="Tenants wait while one is served much.",
        cause="One tenant fills queue and pool; the order does not know tenants.",
        signal="A tenant with over {times} times its weight's share of KV or tokens while others "
        "wait, for {seconds:.0f} s.",
        limits={"times": 2.0, "waiting": 0.5, "seconds": 30},
        smallest_fix="Cap its requests at the workers (`sequences` of its key) and its tokens "
        "(--key-budget minute.tokens=N); keep the others' cache (--kv-quota TENANT=FLOOR:CEILING); "
        "serve by tenant (--admission fair or drf, --tenant-weights).",
        look=("`pigou_generation_tokens_total` by tenant; GET /workers: `waiting_by_tenant`, "
              "`held_tokens_by_tenant`.", "`pigou_requests_queued`."),
        follows=(6, 18),
        alert="max(sum by (tenant) (rate(pigou_generation_tokens_total[5m]))) / "
        "sum(rate(pigou_generation_tokens_total[5m])) > {times} / "
        "count(sum by (tenant) (rate(pigou_generation_tokens_total[5m])) > 0) and "
        "on () sum(pigou_requests_queued) > 0",
        alert_for="2m",
    ),
    FailureMode(
        number=12, name="retry storm",
        symptom="The queue grows faster than users come.",
        cause="Clients give up, and send the same again at once.",
        signal="Over {share:.0%} of requests came again after an attempt that was not served, for "
        "{seconds:.0f} s, and more with longer waits.",
        limits={"share": 0.01, "flat": 0.1, "requests": 10, "seconds": 30},
        smallest_fix="Refuse with 503 or 429 and Retry-After: a bounded queue (--max-queued).",
        remedy="A retry budget and jitter in clients.",
        look=("`pigou_requests_repeated_total`, `pigou_requests_cancelled_total`.",
              "Timeouts of clients beside TTFT."),
        follows=(6, 18),
        alert="sum(rate(pigou_requests_repeated_total[2m])) / "
        f"sum(rate(pigou_requests_total{{{{{_WORK}}}}}[2m])) > {{share}} and "
        "sum(pigou_requests_queued) > 0",
        alert_for="2m",
    ),
    FailureMode(
        number=17, name="under-use",
        symptom="The fleet costs much for what it serves.",
        cause="There are more replicas than traffic; batches are small.",
        signal="Workers busy under {busy:.0%} and nobody waits, for {seconds:.0f} s.",
        limits={"busy": 0.3, "waiting": 0.05, "seconds": 600},
        smallest_fix="Run fewer replicas, or let --planner price do; pool models (--model-pool).",
        look=("`pigou_worker_running` over the day.", "GET /plan."),
        alert="avg(avg_over_time(pigou_worker_running[10m])) < {busy} and "
        "max(max_over_time(pigou_requests_queued[10m])) == 0 and "
        "sum(rate(pigou_generation_tokens_total[10m])) > 0",
        alert_for="10m",
    ),
    FailureMode(
        number=19, name="back-pressure failure",
        symptom="Requests fail with 5xx while the queue grows; workers crash in turn.",
        cause="Nothing is refused when memory and queue are full.",
        signal="Requests fail while the queue grows, and none is refused, for {seconds:.0f} s.",
        limits={"failures": 3, "waiting": 10, "seconds": 30},
        smallest_fix="Restart the workers, with bounds (--max-queued, --max-inflight, "
        "--max-inflight-tokens, --queue-timeout).",
        look=("`pigou_requests_failed_total` by reason.",
              "`pigou_requests_shed_total`: 0 means that nothing is refused."),
        follows=(1, 2, 6, 12, 18),
        alert=f'sum(rate(pigou_requests_total{{{{{_WORK},status=~"5.."}}}}[2m])) > 0 and '
        "deriv(sum(pigou_requests_queued)[2m:10s]) > 0 and "
        "sum(rate(pigou_requests_shed_total[2m])) == 0",
    ),
    FailureMode(
        number=6, name="queue build-up",
        symptom="TTFT climbs without end.",
        cause="More comes than the fleet serves.",
        signal="Requests that wait grow over three windows, {growth:.0f} at least, and more arrive "
        "than are served.",
        limits={"growth": 10.0, "rho": 1.0, "windows": 3},
        smallest_fix="Refuse what matters less (--admission priority, --max-queued); scale "
        "(--planner price).",
        look=("`pigou_requests_queued`.", "Whether batches are full (modes 10, 18)."),
        alert="deriv(sum(pigou_requests_queued)[1m:10s]) > 0 and "
        "sum(pigou_requests_queued) > {growth}",
    ),
    FailureMode(
        number=7, name="p99 spikes by prefill",
        symptom="Streams stutter whenever a long prompt comes.",
        cause="Chunks of prompts are computed in the same steps as decodes, and are too large.",
        signal="ITL P99 over {ratio} times P50, with steps of prompts over {step} times P50 on "
        "workers that decode, for {seconds:.0f} s.",
        limits={"ratio": 3.0, "step": 3.0, "share": 0.02, "seconds": 30},
        smallest_fix="Smaller chunks (--max-batched-tokens); prefill workers (--prefill N).",
        look=("`pigou_inter_token_latency_seconds`: P50 and P99.",
              "`pigou_game_prefill_busy_ratio` of workers that decode."),
        follows=(13,),
        alert="histogram_quantile(0.99, sum by (le) "
        "(rate(pigou_inter_token_latency_seconds_bucket[5m]))) > {ratio} * "
        "histogram_quantile(0.5, sum by (le) "
        "(rate(pigou_inter_token_latency_seconds_bucket[5m]))) and "
        "on () max(pigou_game_prefill_busy_ratio and on (job, instance, worker) "
        'pigou_worker_up{{role!="prefill"}}) > {share}',
        alert_for="5m",
    ),
    FailureMode(
        number=8, name="head-of-line blocking",
        symptom="Short requests wait, now and then, for seconds.",
        cause="A long prompt goes first, and all others behind it.",
        signal="The wait of short prompts follows the longest prompt in computation (correlation "
        "over {correlation}), and is over {times} times that of other windows and {wait_s} s.",
        limits={"correlation": 0.5, "times": 3.0, "wait_s": 0.25, "windows": 6},
        smallest_fix="A lane for long prompts (--long-lane). Where they wait at the gateway, "
        "another order (--admission shortest-remaining).",
        look=("`pigou_prompt_wait_seconds` of short prompts beside `pigou_prompt_begun_tokens`.",
              "GET /decisions: prompts before a slow one."),
        alert=(
            f"histogram_quantile(0.95, sum by (le) (rate({_SHORT}[2m]))) > {{wait_s}} and "
            f"histogram_quantile(0.95, sum by (le) (rate({_SHORT}[2m]))) > {{times}} * "
            f"histogram_quantile(0.95, sum by (le) (rate({_SHORT}[1h]))) and "
            f"histogram_quantile(1, sum by (le) (rate({_BEGUN}[2m]))) > 4 * "
            f"histogram_quantile(0.5, sum by (le) (rate({_BEGUN}[1h])))"
        ),
    ),
    FailureMode(
        number=9, name="long-context starvation",
        symptom="Long requests never begin.",
        cause="The order puts short ones first, always.",
        signal="The longest wait of a long prompt over {times} times the median and twice the P95 "
        "of short ones, and over {wait_s:.0f} s, or a lane that starves, for {seconds:.0f} s.",
        limits={"times": 5.0, "wait_s": 10.0, "seconds": 30},
        smallest_fix="Another order (--admission fair, or fcfs), more ageing "
        "(--admission shortest,ageing=5000), a lane for long prompts (--long-lane); for a class at "
        "its cap, more concurrency.",
        look=("`pigou_prompt_longest_wait_seconds` beside short ones' `pigou_prompt_wait_seconds`.",
              "Order of the queue (--admission shortest starves), `pigou_lane_starves`."),
        follows=(6,),
        alert=(
            "max(pigou_prompt_longest_wait_seconds) > {wait_s} and "
            "max(pigou_prompt_longest_wait_seconds) > {times} * "
            "histogram_quantile(0.5, sum by (le) (rate(pigou_queue_wait_seconds_bucket[5m]))) and "
            "max(pigou_prompt_longest_wait_seconds) > "
            f"2 * histogram_quantile(0.95, sum by (le) (rate({_SHORT}[5m]))) or "
            "max(pigou_lane_starves) > 0"
        ),
    ),
    FailureMode(
        number=10, name="batch inefficiency",
        symptom="Requests wait while the GPUs do little.",
        cause="The cap of running requests is far below what a step carries at no cost.",
        signal="Under {share:.0%} of the batch at which ITL doubles runs, at its cap, with KV free "
        "and requests waiting, for {seconds:.0f} s.",
        limits={"share": 0.25, "kv_usage": 0.8, "waiting": 1.0, "full": 0.8, "seconds": 30},
        smallest_fix="Raise the caps (--max-seqs, --max-inflight).",
        look=("`vllm:num_requests_running` beside max_num_seqs.", "`pigou_requests_queued`."),
        follows=(6,),
        alert="sum(pigou_requests_queued) > 0 and max(pigou_worker_kv_usage_ratio) < 0.5 and "
        "max(pigou_game_expected_itl_seconds) < 1.25 * "
        "min(min_over_time(pigou_game_expected_itl_seconds[1h]))",
        alert_for="5m",
    ),
    FailureMode(
        number=13, name="stream stall",
        symptom="A stream stops, and goes on later.",
        cause="The engine made no step, or the client did not read.",
        signal="A step without prompts over {times:.0f} times ITL P50 and {stall_s} s (engine), or "
        "a client that took nothing for as long (slow reader).",
        limits={"times": 10.0, "stall_s": 0.2},
        smallest_fix="Engine: look at its host, drain the worker. Slow reader: --client-timeout.",
        look=("`pigou_stream_stalls_total` by cause.", "GET /workers: heartbeat of the worker.",
              "CPU of the worker's host."),
        alert='sum(increase(pigou_stream_stalls_total{{cause="client"}}[5m])) > 0 or '
        'sum(increase(pigou_stream_stalls_total{{cause="engine"}}[5m])) > {times}',
    ),
    FailureMode(
        number=18, name="saturation",
        symptom="Waits rise; throughput does not.",
        cause="The GPUs do all they can.",
        signal="As many arrive as are served (over {rho:.0%}), decode batches at the knee, tokens "
        "a second flat within {flat:.0%}, requests waiting, for {seconds:.0f} s.",
        limits={"rho": 0.95, "flat": 0.15, "knee": 0.9, "waiting": 0.1, "seconds": 60},
        smallest_fix="Send what is over to a fallback (`overflow` of --model-pool), or answer with "
        "less (--degrade); more replicas (--planner price).",
        look=("`pigou_game_saturation_state` is 2.", "Tokens a second beside requests waiting."),
        follows=(6,),
        alert="max(pigou_game_saturation_state) == 2 and sum(pigou_requests_queued) > 0 and "
        "sum(rate(pigou_generation_tokens_total[2m])) < 1.1 * "
        "sum(rate(pigou_generation_tokens_total[10m]))",
        alert_for="5m",
    ),
)  # fmt: skip

#: All of them, by number.
MODES: dict[int, FailureMode] = {
    mode.number: mode for mode in sorted(_MODES, key=lambda mode: mode.number)
}
