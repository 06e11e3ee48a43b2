"""The facts: what of a request's tenure the gateway knows itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

import msgspec

from pigou.gateway.asked import Asked
from pigou.gateway.call import Body
from pigou.kv.tenure import Tenure

_list = msgspec.json.Decoder(list[msgspec.Raw] | None)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the gateway knows, whatever a request says.

    Attributes:
        model: that is served.
        release: that the gateway was given; empty for none.
        releases: that the workers report, of weights or engines.
        template: digest of the model's chat template; empty where it is not known here.
    """

    model: str = ""
    release: str = ""
    releases: frozenset[str] = frozenset()
    template: str = ""

    def joined(self, tenure: Tenure, asked: Asked, body: Body, *, chat: bool) -> Tenure:
        """Return a request's whole tenure.

        What is known joins what key and request say (`tenure`) in the same field, so that each
        of the two alone makes another tenure. A request without key, salt and headers, at a
        gateway without a release, says nothing: its tenure is empty, and workers keep apart what
        they know themselves, model and release.

        Args:
            tenure: by key and headers.
            asked: the body as the gateway reads it.
            body: the same, `tools` still encoded.
            chat: whether it came to the chat route.
        """
        stated = replace(tenure, cache_salt=asked.cache_salt or "")
        if stated == Tenure() and not self.release:
            return stated
        template = ""
        if chat:
            own = asked.chat_template
            known = isinstance(own, str)
            template = digest(own.encode("utf-8", "surrogatepass")) if known else self.template
        return replace(
            stated,
            model=self.model if asked.model is None else asked.model,
            release=_packed(self.release, *sorted(self.releases)) + stated.release,
            template=_packed(template) + stated.template,
            tools=frozenset(f"stated:{name}" for name in stated.tools) | _schemas(body),
        )


def digest(text: bytes) -> str:
    """Return the digest that stands for a long text, 32 hexadecimal digits."""
    return blake2b(text, digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def salt(tenure: Tenure) -> str:
    """Return `Tenure.salt`, which few tenures ask for often."""
    return tenure.salt()


def _packed(*parts: str) -> str:
    """Put texts together so that they can be told apart again, and from what follows."""
    return f"{len(parts)};" + "".join(f"{len(part)}:{part}" for part in parts)


def _schemas(body: Body) -> frozenset[str]:
    """Return the versions of a request's tools: the digest of each, as it was sent."""
    raw = body.get("tools")
    if not isinstance(raw, msgspec.Raw):
        return frozenset()
    return frozenset(f"schema:{digest(bytes(tool))}" for tool in _list.decode(raw) or ())
