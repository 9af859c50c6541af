"""The engine in this process: `runtime.engine.Engine` on llama.cpp's low-level functions."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import EngineError
from ...kernels.tokens import NO_TOKENS, TokenIds, concat_tokens
from ..cancel import Cancel
from ..engine import (
    NO_POINTS,
    EngineInfo,
    Grammar,
    MemoryKind,
    OnDecode,
    PrefillProgress,
    Sampling,
    SequenceId,
    SyncPoints,
    SyncReport,
)
from ..gguf import fingerprint
from ..prefix_cache.machine import budgets_of_this_machine, free_memory_bytes
from ..prefix_cache.mode_results import load_results
from ..prefix_cache.options import CacheOptions
from ..prefix_cache.pool import SnapshotPool
from ..prefix_cache.snapshot_files import SnapshotFiles
from ..prefix_cache.snapshot_index import SnapshotIndex
from ..text_watch import TextWatch
from .cache_parts import CacheParts, put_together
from .cells import Cells
from .constraint import ReplyConstraint
from .context import LlamaContext
from .generation import LlamaGeneration
from .grammar import GrammarShelf
from .library import library
from .loading import OUTPUTS_MOST, ContextOptions, LoadedModel, load_model, memory_kind
from .options import (
    DEFAULT_BATCH_TOKENS,
    check_cache_options,
    check_options,
    choose_flash_attention,
    default_sequences,
    identity_of,
)
from .placement import Placement, physical_cores, place
from .residency import check_ids, check_run, end_generation
from .sampler import Sampler
from .sequence import SequenceState
from .tokenizer import LlamaTokenizer
from .turns import Turns

EXIT_PATIENCE_S = 1.0
_SAMPLING_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
}
_WHOLE = frozenset({"top_k", "repeat_last_n"})


class LlamaEngine:
    """A loaded model. See `engine.Engine` for what the methods promise; `open` makes one.

    `n_sequences` hold memory at once at most; more may be open. Where cells or slots run out, the least recently used
    idle sequence gives way, into a memory snapshot where there is room for one. `cache_budgets` says what there is.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: ContextOptions,
        placement: Placement,
        *,
        cache: CacheOptions,
        on_decode: OnDecode | None,
    ) -> None:
        api = library().api
        model.open_context(options)
        self._model = model
        self.placement = placement
        self.turns = Turns()
        self.tokenizer = LlamaTokenizer(model.vocab)
        # llama.cpp rounds the window up, and may lower the batch to it.
        n_cells = int(api.llama_n_ctx(model.context))
        self._n_ctx = min(placement.n_ctx, n_cells)
        n_batch = min(options.n_batch, api.llama_n_batch(model.context))
        self._kind = memory_kind(model)
        self._window_tokens = int(api.llama_model_n_swa(model.pointer))
        self._info = self._describe()
        self.identity = identity_of(self._info, model, options)
        self.context = LlamaContext(
            model.context,
            owner=model,
            cells=Cells(n_slots=options.n_sequences, n_cells=None if self._kind is MemoryKind.RECURRENT else n_cells),
            vocab_size=self.tokenizer.size,
            kind=self._kind,
            window_tokens=self._window_tokens,
            n_batch=n_batch,
            on_decode=on_decode,
        )
        parts = self._open_cache(cache)
        self.pool, self.keeper, self.residency = parts.pool, parts.keeper, parts.residency
        self._grammars = GrammarShelf(self.tokenizer, model.vocab)
        self._at_exit = partial(_free_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _open_cache(self, cache: CacheOptions) -> CacheParts:
        """Put the parts of the prefix cache together, with budgets from what is free now that the model is loaded."""
        folder = None if cache.folder is None else Path(cache.folder)
        held_bytes = 0 if folder is None else SnapshotIndex(folder).survey().held_bytes
        self.cache_budgets = budgets_of_this_machine(cache, used_by_cache_bytes=held_bytes)
        pool = SnapshotPool(
            self.cache_budgets.memory_bytes,
            reserve_bytes=self.cache_budgets.reserve_bytes,
            seed=self.identity.seed,
            available_bytes=free_memory_bytes,
        )
        files = None
        if folder is not None and self.cache_budgets.disk_bytes:
            files = SnapshotFiles(
                folder, identity=self.identity, budget_bytes=self.cache_budgets.disk_bytes, clock=time.time
            )
        tested = None if cache.modes_folder is None else load_results(Path(cache.modes_folder), self.identity)
        self.modes = cache.modes if tested is None else cache.modes.and_also(tested.modes)
        return put_together(
            self.context,
            self.turns,
            pool,
            files,
            seed=self.identity.seed,
            modes=self.modes,
            rest_s=cache.rest_s,
            notes=[] if tested is None else list(tested.notes()),
        )

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int | None = None,
        n_threads: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        type_k: str | None = None,
        type_v: str | None = None,
        flash_attn: bool | None = None,
        n_sequences: int | None = None,
        swa_full: bool = False,
        cache: CacheOptions | None = None,
        on_decode: OnDecode | None = None,
    ) -> Self:
        """Load the GGUF at `path`. None means: the best that is known (`placement` says why for `n_ctx`).

        Without `cache` snapshots are kept in memory only, within a share of what is free.

        Raises ModelFileError where it is no whole GGUF, ModelLoadError where llama.cpp refuses it, UsageError for an
        option out of its range.
        """
        path = Path(path)
        cache_types = type_k or "f16", type_v or "f16"
        batch, ubatch = n_batch or DEFAULT_BATCH_TOKENS, n_ubatch or min(n_batch or DEFAULT_BATCH_TOKENS, 512)
        cache = cache or CacheOptions()
        check_cache_options(cache)
        check_options(n_ctx=n_ctx, n_batch=batch, n_ubatch=ubatch, n_sequences=n_sequences, cache_types=cache_types)
        model = load_model(path, n_gpu_layers=n_gpu_layers)
        try:
            free_bytes = free_memory_bytes()
            placement = place(
                model.metadata,
                asked_n_ctx=n_ctx,
                free_bytes=free_bytes,
                n_ubatch=ubatch,
                n_outputs=OUTPUTS_MOST,
                type_k=cache_types[0],
                type_v=cache_types[1],
            )
            if flash_attn is None:
                flash_attn = choose_flash_attention(
                    model.metadata,
                    offloads=n_gpu_layers != 0 and bool(library().api.llama_supports_gpu_offload()),
                    type_v=cache_types[1],
                    n_cells=placement.n_cells,
                    n_ubatch=ubatch,
                    free_bytes=free_bytes,
                )
            options = ContextOptions(
                n_cells=placement.n_cells,
                n_batch=max(batch, OUTPUTS_MOST),
                n_ubatch=max(ubatch, OUTPUTS_MOST),
                n_threads=n_threads or physical_cores(),
                n_sequences=n_sequences or default_sequences(memory_kind(model)),
                type_k=cache_types[0],
                type_v=cache_types[1],
                flash_attn=flash_attn,
                swa_full=swa_full,
            )
            return cls(model, options, placement, cache=cache, on_decode=on_decode)
        except BaseException:
            model.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """See `engine.Engine.info`."""
        return self._info

    def default_sampling(self) -> Sampling:
        """Return the sampling that the model's file names (`general.sampling.*`), the runtime's where it does not."""
        values = self._model.metadata.values
        found: dict[str, float | int] = {}
        for field, key in _SAMPLING_KEYS.items():
            value = values.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
                found[field] = int(value) if field in _WHOLE else float(value)
        return msgspec.structs.replace(Sampling(), **found)

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        """See `engine.Tokenizer.tokenize`."""
        return self.tokenizer.tokenize(text, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        """See `engine.Tokenizer.detokenize`."""
        return self.tokenizer.detokenize(tokens, special=special)

    def open_sequence(self) -> SequenceId:
        """See `engine.Engine.open_sequence`. Any number may be open."""
        with self.turns:
            self.residency.check_open()
            return self.residency.open().id

    def drop(self, sequence: SequenceId) -> None:
        """See `engine.Engine.drop`."""
        with self.turns:
            self.residency.drop(sequence)

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceId:
        """See `engine.Engine.fork`."""
        with self.turns:
            return self.residency.fork(sequence, at=at).id

    def rest(self, sequence: SequenceId) -> None:
        """See `engine.Engine.rest`."""
        with self.turns:
            self.keeper.rest(self.residency.state(sequence))

    def settle(self) -> None:
        """See `engine.Engine.settle`."""
        self.keeper.settle()

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what befell the cache since the last sync; also after `close`, which may write."""
        return self.residency.take_notes()

    def resident(self, sequence: SequenceId) -> TokenIds:
        """See `engine.Engine.resident`."""
        with self.turns:
            return self.residency.held(self.residency.state(sequence))

    def sync(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        *,
        points: SyncPoints = NO_POINTS,
        reuse: bool = True,
        progress: PrefillProgress | None = None,
        cancel: Cancel | None = None,
    ) -> SyncReport:
        """See `engine.Engine.sync`. A reply of this sequence that is still being generated is ended."""
        check_run(wanted, n_ctx=self._n_ctx, vocab_size=self.tokenizer.size)
        return self.residency.sync(sequence, wanted, points=points, reuse=reuse, progress=progress, cancel=cancel)

    def generate(
        self,
        sequence: SequenceId,
        *,
        sampling: Sampling,
        max_tokens: int,
        grammar: Grammar | None = None,
        stop: tuple[str, ...] = (),
        forced: TokenIds | None = None,
        so_far: TokenIds | None = None,
        cancel: Cancel | None = None,
    ) -> LlamaGeneration:
        """See `engine.Engine.generate`. Raises GrammarError, and EngineError where the sequence was not synced."""
        so_far = NO_TOKENS if so_far is None else so_far
        check_ids(so_far if forced is None else forced, vocab_size=self.tokenizer.size)
        with self._synced(sequence) as state:
            constraint = self._constraint(grammar, so_far) if grammar is not None and forced is None else None
            queued = constraint.forced_start(so_far) if constraint is not None else NO_TOKENS
            generation = LlamaGeneration(
                self.residency,
                self.context,
                self.tokenizer,
                self.turns,
                state,
                max_tokens=min(max_tokens, self._n_ctx - len(state.run)),
                sampler=None
                if forced is not None
                else Sampler(sampling, vocab_size=self.tokenizer.size, history=state.run.view()),
                constraint=constraint,
                stop=self._stop_watch(stop, so_far) if stop and forced is None else None,
                queued=queued if forced is None else forced,
                cancel=cancel,
            )
            state.generation = weakref.ref(generation)
            return generation

    @contextmanager
    def _synced(self, sequence: SequenceId) -> Iterator[SequenceState]:
        """Hold the engine's turn, with the logits of a synced sequence at hand.

        One that gave way to others since is brought back, or evaluated again. Raises EngineError for one that was not
        synced.
        """
        while True:
            with self.turns:
                state = self.residency.state(sequence)
                end_generation(state)
                if self.residency.ready(state):
                    state.awaits_reply, state.unanswered, state.user = False, None, threading.current_thread()
                    yield state
                    return
                run = state.unanswered
            if run is None:
                raise EngineError(f"sequence {sequence} has no logits to go on from: sync it first")
            self.sync(sequence, run)

    def score(self, sequence: SequenceId, tokens: TokenIds, *, given: TokenIds) -> list[float]:
        """See `engine.Engine.score`. `given` is not empty."""
        check_run(concat_tokens([given, tokens]), n_ctx=self._n_ctx, vocab_size=self.tokenizer.size)
        self.sync(sequence, given)
        scores: list[float] = []
        with self._synced(sequence) as state:
            self.context.arm(None)
            before = self.context.logits(state).copy()
            for start in range(0, len(tokens), OUTPUTS_MOST):
                part = tokens[start : start + OUTPUTS_MOST]
                self.residency.decode(state, part, last_logits=True, all_logits=True)
                # Row i foretells token i + 1 of the part, the logits before it its first.
                rows = [before, *(self.context.output(row) for row in range(len(part) - 1))]
                scores += [_log_probability(row, token) for row, token in zip(rows, part.tolist(), strict=True)]
                before = self.context.output(len(part) - 1).copy()
        return scores

    def check_integrity(self) -> None:
        """Compare the account of every sequence with what llama.cpp holds. Raises AssertionError where they differ."""
        with self.turns:
            self.residency.check_open()
            self.residency.check_integrity()
            self.pool.check_integrity()

    def close(self) -> None:
        """See `engine.Engine.close`. What is worth keeping across a restart is written first."""
        if not self.residency.is_closed:
            self.keeper.close()
        with self.turns:
            self._free()

    def free_if_idle(self) -> bool:
        """Free the model, unless another thread is in it; say whether it is free. Nothing is written any more."""
        if not self.turns.try_enter():
            return False
        with self.turns:
            self._free()
        return True

    def _free(self) -> None:
        if not self.residency.is_closed:
            self.residency.close()
            self.tokenizer.close()
            self._model.close()
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _constraint(self, grammar: Grammar, so_far: TokenIds) -> ReplyConstraint:
        constraint = ReplyConstraint(grammar, self._grammars.get(grammar.gbnf), self.tokenizer)
        for token in so_far.tolist():
            constraint.observe(token)
        return constraint

    def _stop_watch(self, stop: tuple[str, ...], so_far: TokenIds) -> TextWatch:
        watch = TextWatch(stop)
        watch.feed(self.tokenizer.detokenize(so_far))
        return watch

    def _describe(self) -> EngineInfo:
        metadata, tokenizer = self._model.metadata, self.tokenizer
        return EngineInfo(
            model_name=metadata.name or self._model.path.stem,
            model_path=str(self._model.path),
            fingerprint=fingerprint(self._model.path, metadata),
            n_ctx=self._n_ctx,
            n_ctx_trained=self.placement.n_ctx_trained,
            vocab_size=tokenizer.size,
            memory=self._kind,
            sliding_window_tokens=self._window_tokens,
            chat_template=metadata.chat_template,
            add_bos=tokenizer.add_bos,
            bos_id=tokenizer.bos_id,
            bos_text=tokenizer.text(tokenizer.bos_id),
            eos_text=tokenizer.text(tokenizer.eos_id),
            control_texts=tokenizer.control_texts,
        )


def _free_at_exit(engine: weakref.ref[LlamaEngine]) -> None:
    """Free what was not closed as the process ends. A daemon thread that does not leave llama.cpp is left in it."""
    opened = engine()
    if opened is None:
        return
    until_s = time.monotonic() + EXIT_PATIENCE_S
    while not opened.free_if_idle() and time.monotonic() < until_s:
        time.sleep(0.01)


def _log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Return log softmax(logits)[token]. Shape: (vocab_size,)."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return float(shifted[token] - np.log(np.exp(shifted).sum()))
