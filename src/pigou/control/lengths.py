"""Output lengths, predicted as a distribution and a rank, from requests that ended.

A declared `max_tokens` is a claim: it cuts what a request can get, and moves no prediction.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from pigou.config import ConfigError, check_bounds, check_fields
from pigou.registry import named, read_struct
from pigou.request import Request

Floats = NDArray[np.float64]
GROUP = "pigou.lengths"
#: The key of `ControlConfig.lengths` that names the predictor; the others are its parameters.
NAME = "predictor"
#: Blocks of a prompt whose hash stands for a template; deeper ones for a document or a session.
DEPTHS = (1, 8, 64)
#: Bins of lengths: four an octave, up to 2^18 tokens.
_PER_OCTAVE, _BINS = 4, 72
_FORMAT = 1
_MAX_SAVED = 512  # nodes written to a file: those with most requests
_PAIRS = 256  # predictions whose rank correlation is known
ERRORS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # bounds of `LengthScore.buckets`
_CUTS = 2.0 ** (np.arange(_BINS + 1) / _PER_OCTAVE)


def _centres() -> Floats:
    low, high = np.ceil(_CUTS[:-1]), np.ceil(_CUTS[1:]) - 1.0
    whole = high >= low
    centres: Floats = np.where(whole, (low + high) / 2.0, np.sqrt(_CUTS[:-1] * _CUTS[1:]))
    return centres


#: Tokens that stand for each bin, (bins,), and their logarithms.
TOKENS = _centres()
_LOGS = np.log(TOKENS)
#: Before anything ended: lognormal around 128 tokens, a factor of e^1.3 wide.
_PRIOR = np.exp(-0.5 * ((_LOGS - math.log(128.0)) / 1.3) ** 2) * np.gradient(_CUTS[:-1]) / TOKENS
_PRIOR /= _PRIOR.sum()

#: Lexical features: name, and pattern whose matches are counted.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        ("questions", r"\?"),
        ("how_why", r"\b(?:how|why)\b"),
        ("what_who", r"\b(?:what|who|when|where|which)\b"),
        ("yes_no", r"\b(?:yes or no|true or false|yes/no)\b"),
        ("numbers", r"\d+"),
        ("lists", r"\b(?:list|enumerate|steps?|bullets?)\b"),
        ("fences", r"```"),
        ("code", r"\b(?:code|function|class|script|implement|python|sql)\b"),
        ("write", r"\b(?:write|generate|create|compose|draft)\b"),
        ("story", r"\b(?:story|essay|article|poem|report|chapter)\b"),
        ("explain", r"\b(?:explain|describe|discuss|analy[sz]e|compare)\b"),
        ("summary", r"\b(?:summar\w*|tl;dr|translate)\b"),
        ("brief", r"\b(?:brief\w*|short\w*|concise\w*|one word|only)\b"),
        ("long", r"\b(?:detail\w*|long|comprehensive|thorough\w*|in[- ]depth)\b"),
        ("choose", r"\b(?:classify|choose|label|extract|answer with)\b"),
        ("structured", r"\b(?:json|yaml|xml|table|csv)\b"),
    )
)
#: Names of the features of a prompt's text.
LEXICAL = ("characters", "words", "lines", *(name for name, _ in _PATTERNS))
#: Characters at a prompt's end that features are counted in.
MAX_CHARACTERS = 4096


def lexical(text: str) -> tuple[float, ...]:
    """Return the features `LEXICAL` of a prompt's last `MAX_CHARACTERS`: log(1 + count) each."""
    text = text[-MAX_CHARACTERS:]
    counts = [len(text), text.count(" ") + 1, text.count("\n") + 1]
    counts += [sum(1 for _ in pattern.finditer(text)) for _, pattern in _PATTERNS]
    return tuple(round(math.log1p(count), 3) for count in counts)


class Prediction(NamedTuple):
    """Predicted output tokens of a request."""

    rank: float  # without any declared limit: what orders go by
    mean: float  # under the declared limit
    variance: float  # squared tokens, likewise
    shares: Floats = _PRIOR  # probability of each bin, (bins,)
    factor: float = 1.0  # multiplies the bins' tokens

    def quantile(self, share: float) -> float:
        """Return the tokens that `share` of such requests do not exceed, without a limit."""
        bin_ = int(self.shares.cumsum().searchsorted(share * float(self.shares.sum())))
        return float(TOKENS[min(bin_, _BINS - 1)]) * self.factor


class LengthPredictor(Protocol):
    """Predicts output lengths, built with parameters of type `Params`."""

    score: LengthScore

    def predict(self, request: Request) -> Prediction:
        """Return a request's predicted output length."""
        ...

    def observe(self, request: Request, tokens: int) -> None:
        """Learn that a request ended after `tokens` output tokens."""
        ...


class LengthScore:
    """How well lengths were predicted, each just before it was learnt."""

    def __init__(self) -> None:
        self.observed = 0
        self.buckets = [0] * (len(ERRORS) + 1)  # predictions by error: longer over shorter length
        self.error_sum = 0.0
        self._pairs: Floats = np.zeros((2, _PAIRS))

    def note(self, predicted: float, tokens: int) -> None:
        """Compare a prediction with what came."""
        self._pairs[:, self.observed % _PAIRS] = predicted, tokens
        self.observed += 1
        error = max(predicted, tokens) / max(1.0, min(predicted, tokens))
        self.buckets[bisect_left(ERRORS, error)] += 1
        self.error_sum += error

    @property
    def tau(self) -> float:
        """Kendall's tau of the last predictions, -1 to 1; 0 before two."""
        return kendall_tau(*self._pairs[:, : min(self.observed, _PAIRS)])


def kendall_tau(first: Floats, second: Floats) -> float:
    """Return Kendall's tau-b of two rankings, (n,) each, in O(n^2); 0 if one has no order."""
    a = np.sign(first[:, None] - first[None, :])
    b = np.sign(second[:, None] - second[None, :])
    pairs = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return float((a * b).sum()) / pairs if pairs else 0.0


def noisy_lengths(tokens: Sequence[int], tau: float, seed: int) -> list[int]:
    """Return the same lengths in another order, with a rank correlation of `tau` to the true one.

    A Gaussian copula: normal scores correlated by sin(pi tau / 2). 0 is a random permutation, and 1
    the truth. Unless the truth is asked for, equal lengths are ordered at random.
    """
    check_bounds("tau", tau, ge=0, le=1)
    if tau == 1.0 or not tokens:
        return list(tokens)
    rng, n = np.random.default_rng(seed), len(tokens)
    true = np.array(tokens)
    order = np.lexsort((rng.random(n), true))
    scores = np.empty(n)
    normal = NormalDist()
    scores[order] = [normal.inv_cdf((rank + 0.5) / n) for rank in range(n)]
    rho = math.sin(math.pi * tau / 2.0)
    noisy = rho * scores + math.sqrt(1.0 - rho * rho) * rng.standard_normal(n)
    drawn = np.empty(n, dtype=np.int64)
    drawn[np.argsort(noisy, kind="stable")] = np.sort(true)
    return [int(length) for length in drawn]


class OracleParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Oracle`."""

    tau: float = 1.0  # rank correlation with the truth; the simulator draws the predictions

    def __post_init__(self) -> None:
        check_bounds("tau", self.tau, ge=0, le=1)


class Oracle:
    """Takes `Request.expected`, which the simulator draws from the true lengths."""

    Params: ClassVar[type[msgspec.Struct]] = OracleParams

    def __init__(self, params: OracleParams | None = None) -> None:
        self.params, self.score = params or OracleParams(), LengthScore()

    def predict(self, request: Request) -> Prediction:
        """Return the drawn length."""
        length = float(max(1, request.expected))
        return Prediction(length, min(length, request.max_tokens), 0.0)

    def observe(self, request: Request, tokens: int) -> None:
        """Count the prediction's error."""
        self.score.note(float(max(1, request.expected)), tokens)


class OnlineParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of `Online`."""

    # requests that the prediction one level above is worth.
    shrinkage: float = 4.0
    memory: int = 256  # requests of a tenant or template after which one counts 1/e
    # ridge penalty of the features' weights, in requests.
    penalty: float = 32.0
    max_nodes: int = 4096  # tenants, sizes and templates with counts; the last used stay

    def __post_init__(self) -> None:
        check_fields(self, "shrinkage", "penalty", gt=0)
        check_bounds("memory", self.memory, ge=1)
        check_bounds("max_nodes", self.max_nodes, ge=16)


class LengthModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `Online` learned, as in the file of `pigou trace train`."""

    format: int
    features: tuple[str, ...]
    requests: int
    nodes: list[tuple[str, dict[int, float]]]  # requests by bin
    gram: list[list[float]]
    moments: list[float]


class Online:
    """Shrinks towards the level above: all, tenant, size of prompt, template; learns from each end.

    | symbol | meaning |
    |---|---|
    | c_l | requests by bin of length at level l, forgotten by exp(-1 / memory) per request |
    | p_l | (c_l + shrinkage p_(l-1)) / (sum c_l + shrinkage) |
    | delta | x w: log of the factor on the bins' tokens, ridge regression on a prompt's features |

    A request cut by its own limit counts above it by p, so that cutting answers short teaches
    nothing. The same requests learned from a file are a warm start.
    """

    Params: ClassVar[type[msgspec.Struct]] = OnlineParams
    FEATURES: ClassVar[tuple[str, ...]] = ("prompt", "prompt_squared", *LEXICAL)

    def __init__(self, params: OnlineParams | None = None) -> None:
        self.params, self.score = params or OnlineParams(), LengthScore()
        self._nodes: OrderedDict[str, Floats] = OrderedDict()
        size = len(self.FEATURES)
        self._gram: Floats = np.zeros((size, size))
        self._moments: Floats = np.zeros(size)
        self._weights: Floats = np.zeros(size)
        self._learned = 0

    def predict(self, request: Request) -> Prediction:
        """Return a request's predicted output length."""
        shares = self._shares(request)
        shift = float(self._features(request) @ self._weights)
        factor = math.exp(min(2.0, max(-2.0, shift)))
        tokens = np.maximum(1.0, TOKENS * factor)
        rank = float(shares @ tokens)
        limited = np.minimum(tokens, float(request.max_tokens))
        mean = float(shares @ limited)
        variance = max(0.0, float(shares @ (limited * limited)) - mean * mean)
        return Prediction(rank, mean, variance, shares, factor)

    def observe(self, request: Request, tokens: int) -> None:
        """Learn that a request ended after `tokens` output tokens."""
        tokens = max(1, tokens)
        bin_ = min(_BINS - 1, int(_PER_OCTAVE * math.log2(tokens) + 1e-9))
        predicted = self.predict(request)
        cut = tokens >= request.max_tokens
        ended = np.zeros(_BINS)
        ended[bin_] = 1.0
        if cut:
            above = predicted.shares.copy()
            above[:bin_] = 0.0
            ended = above / above.sum() if above.sum() > 1e-9 else ended
        keep = math.exp(-1.0 / self.params.memory)
        for key in self._path(request):
            counts = self._nodes.pop(key, None)
            self._nodes[key] = ended.copy() if counts is None else counts * keep + ended
        while len(self._nodes) > self.params.max_nodes:
            self._nodes.popitem(last=False)
        if not cut:
            self.score.note(predicted.rank, tokens)
            self._regress(request, math.log(tokens) - float(predicted.shares @ _LOGS))

    def model(self) -> LengthModel:
        """Return what was learned."""
        counts = sorted(self._nodes.items(), key=lambda node: -float(node[1].sum()))[:_MAX_SAVED]
        nodes = [
            (key, {int(bin_): round(float(node[bin_]), 3) for bin_ in np.flatnonzero(node > 5e-4)})
            for key, node in reversed(counts)
        ]
        return LengthModel(
            format=_FORMAT, features=self.FEATURES, requests=self._learned, nodes=nodes,
            gram=np.round(self._gram, 6).tolist(), moments=np.round(self._moments, 6).tolist(),
        )  # fmt: skip

    def restore(self, model: LengthModel) -> None:
        """Begin with what was learned elsewhere; raises ConfigError for another version's."""
        size = len(self.FEATURES)
        shape = len(model.moments), *{len(row) for row in model.gram}, len(model.gram)
        if model.format != _FORMAT or model.features != self.FEATURES or shape != (size,) * 3:
            raise ConfigError(
                f"length_model has format {model.format} and features {len(model.features)}; this "
                f"Pigou reads format {_FORMAT} with {size}: write it anew with `pigou trace train`"
            )
        for key, counts in model.nodes:
            node = self._nodes[key] = np.zeros(_BINS)
            for bin_, count in counts.items():
                if not (0 <= bin_ < _BINS and 0.0 <= count < math.inf):
                    raise ConfigError(
                        f"length_model: node {key!r} has {count} requests in bin {bin_}; bins are "
                        f"0 to {_BINS - 1}, and counts 0 or more: write the file anew"
                    )
                node[bin_] = count
        self._gram, self._moments = np.array(model.gram), np.array(model.moments)
        self._learned = model.requests
        self._solve()

    def _shares(self, request: Request) -> Floats:
        shares, prior = _PRIOR, self.params.shrinkage
        for key in self._path(request):
            counts = self._nodes.get(key)
            if counts is not None:
                shares = (counts + prior * shares) / (counts.sum() + prior)
        return shares

    def _path(self, request: Request) -> list[str]:
        """Return the keys of a request's levels, the most general first."""
        tenant = request.tenant
        path = ["", f"t{tenant}", f"s{request.prompt.bit_length()}/{tenant}"]
        keys = request.keys_of(min(request.keys, default=0))
        path += [f"b{keys.item(depth - 1):x}/{tenant}" for depth in DEPTHS if depth <= len(keys)]
        return path

    def _features(self, request: Request) -> Floats:
        x = np.zeros(len(self.FEATURES))
        octaves = math.log2(request.prompt) - 10.0
        x[0], x[1] = octaves / 4.0, octaves * octaves / 16.0
        x[2 : 2 + len(request.features)] = request.features
        return x

    def _regress(self, request: Request, residual: float) -> None:
        """Add a request's log length over the levels' prediction to the ridge regression."""
        x = self._features(request)
        keep = math.exp(-1.0 / (8.0 * self.params.memory))
        self._gram = keep * self._gram + x[:, None] * x[None, :]
        self._moments = keep * self._moments + x * residual
        self._learned += 1
        if self._learned % 16 == 0:
            self._solve()

    def _solve(self) -> None:
        ridge = self._gram + self.params.penalty * np.eye(len(self._moments))
        self._weights = np.linalg.solve(ridge, self._moments).astype(np.float64)


def load(chosen: Mapping[str, Any], model: Mapping[str, Any]) -> LengthPredictor | None:
    """Build the predictor named `predictor`; None for `mean`. Raises ConfigError."""
    values = dict(chosen)
    name = values.pop(NAME, None)
    if name == "mean" and not values and not model:
        return None
    if name == "mean":
        given = f"length_model is given for {model.get('requests')} requests" if model else ""
        given = given or f"lengths has {', '.join(values)}"
        raise ConfigError(f"{given}, and the predictor is mean; give lengths online")
    kind = named(GROUP, name, "length predictor")
    predictor: LengthPredictor = kind(read_struct(f"length predictor {name}", kind.Params, values))
    if model:
        if not isinstance(predictor, Online):
            raise ConfigError(
                f"length_model is given, and lengths is {name}; only online reads one"
            )
        predictor.restore(read_struct("length_model", LengthModel, model))
    return predictor
