"""The baseline: what a loop of `llama_decode` costs with nothing around it.

As lean as Python can: no account of what is resident, no pieces, no cancel, no check but that of the return code. The
model is loaded a second time (its weights are mapped, so that they are in memory once), with a context that holds one
sequence and one row of logits. Nothing of the runtime is imported, so that a process that runs this module holds a
model and a context alone: `python -m chapbook.bench.bare_loop`, see `memory`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Generator
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.errors import DecodeFailed, ModelLoadError

if TYPE_CHECKING:
    from ..kernels.tokens import TokenIds
    from ..runtime.engine import Sampling
    from ..runtime.llama import LlamaEngine


@dataclass(frozen=True, slots=True)
class BareParameters:
    """The parameters of a context that an engine and its baseline share; the rest is llama.cpp's default in both."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: int = -1
    """As llama.cpp counts: -1 leaves it to the library."""

    @classmethod
    def of_engine(cls, engine: LlamaEngine) -> BareParameters:
        """Read them from the context of an engine, and what it was opened with."""
        from llama_cpp import llama_cpp as api  # noqa: PLC0415  (heavy, and an extra)

        context = engine.context.pointer
        return cls(
            n_ctx=api.llama_n_ctx(context),
            n_batch=api.llama_n_batch(context),
            n_ubatch=api.llama_n_ubatch(context),
            n_threads=api.llama_n_threads(context),
            flash_attn={"auto": -1, "off": 0, "on": 1}[engine.identity.flash_attn],
        )

    def arguments(self) -> list[str]:
        """Return them as arguments of a command."""
        return [str(value) for value in astuple(self)]


class BareLoop:
    """A model, a context, and the two loops: over a prompt in batches, over a reply token by token."""

    def __init__(self, path: Path, parameters: BareParameters) -> None:
        """Load the model. Raises ModelLoadError where llama.cpp refuses it."""
        from llama_cpp import llama_cpp as api  # noqa: PLC0415  (heavy, and an extra)

        self._api: Any = api
        self._n_batch = parameters.n_batch
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = -1 if api.llama_supports_gpu_offload() else 0
        self._model = api.llama_model_load_from_file(str(path).encode(), model_params)
        self._context = self._model and api.llama_init_from_model(self._model, _context_params(api, parameters))
        if not self._context:
            raise ModelLoadError(
                f"llama.cpp could not load {path} a second time, with a window of {parameters.n_ctx:,} tokens: "
                f"a smaller n_ctx takes less memory",
                path=path,
            )
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._token = (api.llama_token * 1)()
        self._one = api.llama_batch_get_one(self._token, 1)

    def clear(self) -> None:
        """Forget every token."""
        self._api.llama_memory_clear(self._memory, False)

    def prefill(self, tokens: TokenIds) -> None:
        """Evaluate a run, shape (n,), after what is there, in batches; its last logits are at hand afterwards."""
        api, context, data = self._api, self._context, tokens.ctypes.data
        for begin in range(0, len(tokens), self._n_batch):
            count = min(self._n_batch, len(tokens) - begin)
            chunk = ctypes.cast(data + begin * tokens.itemsize, api.llama_token_p)
            _require(api.llama_decode(context, api.llama_batch_get_one(chunk, count)))
        api.llama_synchronize(context)

    def reply(self, sampling: Sampling | None, history: TokenIds | None = None) -> Generator[int, None, None]:
        """Yield tokens for ever: each is evaluated, and the next one chosen, when that one is asked for.

        None is greedy. `history` holds the tokens that a repeat penalty looks back on.
        """
        sample, decode, context = self._api.llama_sampler_sample, self._api.llama_decode, self._context
        token, one = self._token, self._one
        chain = self._chain(sampling, history)
        try:
            while True:
                token[0] = chosen = sample(chain, context, -1)
                yield chosen
                _require(decode(context, one))
        finally:
            self._api.llama_sampler_free(chain)

    def tokenize(self, text: bytes) -> int:
        """Return how many tokens a text has: one call of `llama_tokenize`, with room for a token of every byte."""
        room = (self._api.llama_token * (len(text) + 1))()
        vocab = self._api.llama_model_get_vocab(self._model)
        return int(self._api.llama_tokenize(vocab, text, len(text), room, len(room), False, False))

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def held_tokens(self) -> int:
        """How many tokens were evaluated since it was cleared."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def close(self) -> None:
        """Free context and model; the loop is not used afterwards."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def _chain(self, sampling: Sampling | None, history: TokenIds | None) -> Any:
        """Return the chain that `runtime.llama.sampler` makes, written a second time."""
        api = self._api
        chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if sampling is not None and sampling.repeat_penalty != 1.0:
            last, penalty = sampling.repeat_last_n, sampling.repeat_penalty
            api.llama_sampler_chain_add(
                chain, api.llama_sampler_init_penalties(self._vocab_size, last, penalty, 0.0, 0.0)
            )
            for token in [] if history is None else history[-last:].tolist():
                api.llama_sampler_accept(chain, token)
        for part in self._choosing_parts(sampling):
            api.llama_sampler_chain_add(chain, part)
        return chain

    def _choosing_parts(self, sampling: Sampling | None) -> list[Any]:
        api = self._api
        if sampling is None or sampling.temperature <= 0:
            return [api.llama_sampler_init_greedy()]
        return [
            api.llama_sampler_init_top_k(sampling.top_k),
            api.llama_sampler_init_top_p(sampling.top_p, 1),
            api.llama_sampler_init_min_p(sampling.min_p, 1),
            api.llama_sampler_init_temp(sampling.temperature),
            api.llama_sampler_init_dist(sampling.seed or 0),
        ]


def _context_params(api: Any, parameters: BareParameters) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = parameters.n_ctx, parameters.n_batch, parameters.n_ubatch
    params.n_threads = params.n_threads_batch = parameters.n_threads
    params.flash_attn_type = parameters.flash_attn
    params.n_outputs_max = 1
    params.no_perf = True
    return params


def _require(code: int) -> None:
    if code:
        raise DecodeFailed(f"the baseline's llama_decode failed with code {code}", code=code, position=-1)


def hold(arguments: list[str]) -> None:
    """Evaluate and generate as many tokens as asked for, say so, and keep everything until standard input ends.

    `arguments`: the model, the five parameters, the tokens to evaluate and to generate.
    """
    path, *numbers = arguments
    *parameters, evaluated, generated = map(int, numbers)
    loop = BareLoop(Path(path), BareParameters(*parameters))
    loop.prefill(np.arange(evaluated, dtype=np.int32) % loop.vocab_size)
    reply = loop.reply(None)
    for _ in islice(reply, generated + 1):
        pass
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    hold(sys.argv[1:])
