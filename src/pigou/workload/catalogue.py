"""The catalogue of public traces: where their owners keep them, and under which licence.

Checksums are those of the owners' files: computed from copies of the same size, or said by the
owner's own Git LFS. Where neither was to be had the entry is `unverified`: what is downloaded is
taken as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pigou.config import ConfigError

_RAW = "https://raw.githubusercontent.com"
_LFS = "https://media.githubusercontent.com/media"
_MOONCAKE = f"{_RAW}/kvcache-ai/Mooncake"
_AZURE = f"{_RAW}/Azure/AzurePublicDataset/790921015d50dd6aae7f7e47f39ba0e235ad6b08/data"
_AZURE_2024 = "https://github.com/Azure/AzurePublicDataset/releases/download/dataset-llm-2024"
_BURST = f"{_LFS}/HPMLL/BurstGPT/5d93d820d9b6bee4e26914df003e5713538164ae/data"
_BAILIAN = (
    f"{_LFS}/alibaba-edu/qwen-bailian-usagetraces-anon/0b4273a1d8a83935b9d9356e78f95c31f2ac64cf"
)
_AZURE_PAGE = "https://github.com/Azure/AzurePublicDataset"
_MOONCAKE_PAGE = "https://github.com/kvcache-ai/Mooncake"
_BURST_PAGE = "https://github.com/HPMLL/BurstGPT"
_BAILIAN_PAGE = "https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon"
_UNSTATED = "not stated by the owner"


@dataclass(frozen=True, slots=True)
class Listed:
    """One public trace.

    Attributes:
        name: by which it is asked for.
        what: a few words.
        address: of the file; empty where it is no single file.
        page: of its owner.
        licence: as its owner says.
        kind: format, as `pigou.workload.formats` reads it; empty where it does not.
        sha256: of the file; empty where it is not known.
        size: bytes; 0 where it is not known.
    """

    name: str
    what: str
    address: str
    page: str
    licence: str
    kind: str
    sha256: str = ""
    size: int = 0

    @property
    def file(self) -> str:
        """The file's own name."""
        return self.address.rsplit("/", 1)[-1]

    @property
    def verified(self) -> bool:
        """Whether what is downloaded can be told from anything else."""
        return bool(self.sha256)


TRACES: tuple[Listed, ...] = (
    Listed(
        "mooncake-conversation",
        "12,031 chat requests of Kimi, with blocks of 512 tokens (FAST'25)",
        f"{_MOONCAKE}/a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces/"
        "conversation_trace.jsonl",
        _MOONCAKE_PAGE, "Apache-2.0", "mooncake",
        "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df", 3_029_533,
    ),
    Listed(
        "mooncake-synthetic",
        "requests made from public data sets, with blocks of 512 tokens (FAST'25)",
        f"{_MOONCAKE}/3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces/"
        "synthetic_trace.jsonl",
        _MOONCAKE_PAGE, "Apache-2.0", "mooncake", size=1_136_313,
    ),
    Listed(
        "mooncake-toolagent",
        "tool and agent requests of Kimi, with blocks of 512 tokens (FAST'25)",
        f"{_MOONCAKE}/main/FAST25-release/traces/toolagent_trace.jsonl",
        _MOONCAKE_PAGE, "Apache-2.0", "mooncake",
    ),
    Listed(
        "azure-2023-code",
        "8,819 requests of a code service, an hour (Splitwise, ISCA'24)",
        f"{_AZURE}/AzureLLMInferenceTrace_code.csv",
        _AZURE_PAGE, "CC-BY-4.0", "azure",
        "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6", 320_117,
    ),
    Listed(
        "azure-2023-conv",
        "requests of a chat service, an hour (Splitwise, ISCA'24)",
        f"{_AZURE}/AzureLLMInferenceTrace_conv.csv",
        _AZURE_PAGE, "CC-BY-4.0", "azure", size=719_188,
    ),
    Listed(
        "azure-2024-code",
        "requests of a code service, a week (DynamoLLM)",
        f"{_AZURE_2024}/AzureLLMInferenceTrace_code_1week.csv",
        _AZURE_PAGE, "CC-BY-4.0", "azure",
    ),
    Listed(
        "azure-2024-conv",
        "requests of a chat service, a week (DynamoLLM)",
        f"{_AZURE_2024}/AzureLLMInferenceTrace_conv_1week.csv",
        _AZURE_PAGE, "CC-BY-4.0", "azure",
    ),
    Listed(
        "burstgpt-1",
        "1.4 million requests to ChatGPT and GPT-4, two months, failures among them",
        f"{_BURST}/BurstGPT_1.csv",
        _BURST_PAGE, _UNSTATED, "burstgpt",
        "4bb3783693d0a435686fbfc885615d2349bd067239079fa4b749f2e679e12122", 52_283_111,
    ),
    Listed(
        "burstgpt-1-without-fails",
        "1.4 million requests to ChatGPT and GPT-4, two months",
        f"{_BURST}/BurstGPT_without_fails_1.csv",
        _BURST_PAGE, _UNSTATED, "burstgpt",
        "a4d068a7113ec0290e74063a1b3447dc6001a30e4298eb313581b71006dda1f4", 51_429_517,
    ),
    Listed(
        "burstgpt-2",
        "3.9 million requests to ChatGPT and GPT-4, the two months after, failures among them",
        f"{_BURST}/BurstGPT_2.csv",
        _BURST_PAGE, _UNSTATED, "burstgpt",
        "44bf5942b03fca42c01a226a545ad3a750ec62688faecd67b6831c56a8928bf7", 144_819_209,
    ),
    Listed(
        "bailian-coder",
        "requests of Qwen Coder on Alibaba's Bailian, with blocks of 16 tokens",
        f"{_BAILIAN}/qwen_coder_blksz_16.jsonl",
        _BAILIAN_PAGE, "Apache-2.0", "bailian",
        "3d74974cebb7bccb69b1ca6ea210a44d9a3033443c0271ed015327284dea1aff", 132_054_902,
    ),
    Listed(
        "bailian-thinking",
        "requests of a reasoning Qwen on Alibaba's Bailian, with blocks of 16 tokens",
        f"{_BAILIAN}/qwen_thinking_blksz_16.jsonl",
        _BAILIAN_PAGE, "Apache-2.0", "bailian",
        "41ac36d9d1b54d084eeb6b05e9d142ba9d02f8bf79cfc9fff418d8ab7cdee906", 27_901_454,
    ),
    Listed(
        "servegen",
        "rates and lengths of Alibaba's clients, from which workloads are drawn; no single file",
        "",
        "https://github.com/alibaba/ServeGen", "Apache-2.0", "",
    ),
)  # fmt: skip


def listed(name: str) -> Listed:
    """Return the trace of this name.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    for each in TRACES:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in TRACES)
    raise ConfigError(f"trace is {name!r}; it must be one of: {names}")
