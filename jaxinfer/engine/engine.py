"""The engine: `step()` = schedule, dispatch, read back what the step before gave.

The device runs one step behind the host: while it computes, the host reads the tokens of the previous step, detokenises
and plans. Tokens stay on the device between steps, so nothing waits for the host.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache import INVALID
from jaxinfer.checkpoints.model import Model
from jaxinfer.config import EngineConfig
from jaxinfer.engine import incident
from jaxinfer.engine.prefix import PrefixCache
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.request import Completion, Request, SamplingParams, Status, TokenLogprob
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.stopping import take_text
from jaxinfer.errors import UserError
from jaxinfer.parallel.kernels import Kernels
from jaxinfer.parallel.sharding import make_mesh, replicated, spread
from jaxinfer.sampling import SamplingState
from jaxinfer.steps import MISMATCH, NO_PAGE, ServingState, StepOutput


@dataclass(frozen=True)
class Event:
    """Something a request's caller sees: new text and tokens, and at the end its completion."""

    request: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    completion: Completion | None = None


@dataclass
class Counters:
    """What the engine has done since it started. `handed_over` counts requests that a prefill worker passed on,
    `mismatches` and `recomputed` those whose check failed and those of them that got a second chance, `quarantined`
    pages that were set aside, `repairs` free lists that contradicted the host's count and were written anew.

    Of the prefix cache: requests looked up when they were first admitted, tokens of their prompts, those of them that
    were found, pages evicted, and requests refused pages that were not what they had been kept as."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    handed_over: int = 0
    mismatches: int = 0
    recomputed: int = 0
    quarantined: int = 0
    repairs: int = 0
    prefix_lookups: int = 0
    prefix_prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_evictions: int = 0
    prefix_refusals: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were in the prefix cache."""
        return self.prefix_hit_tokens / max(self.prefix_prompt_tokens, 1)


@dataclass(frozen=True)
class InFlight:
    """A dispatched step whose tokens have not been read: the requests of its rows, and which rows give a token."""

    requests: list[Request]
    epochs: list[int]
    emits: list[bool]
    output: StepOutput

    @property
    def ready(self) -> bool:
        """Whether reading it would not wait."""
        return self.output.tokens.is_ready()  # type: ignore[attr-defined]


class Engine:
    """Serves one model. Not for use by several threads at once."""

    def __init__(
        self, model: Model, config: EngineConfig, on_logits: Callable[[int, int, np.ndarray], Any] | None = None
    ):
        """Compiles everything. `on_logits(request, place in output, logits [V])` sees what a token was drawn from."""
        config = fit_to_model(config, model)
        self.model, self.config, self.on_logits = model, config, on_logits
        model.config.check_devices(config.devices)
        mesh = make_mesh(config.devices, config.first_device)
        packed = Kernels.choose(config.kernels, mesh).used
        if packed and config.precision.kv.kind == "f32":
            raise UserError("the kernels read bf16 and fp8_e4m3 pages, not f32")
        params = model.prepared(config.precision, packed)
        dtype = jnp.bfloat16 if packed else model.compute_dtype  # the kernels take 16-bit activations
        self.programs = Programs(model.config, params, model.kv_scales, config, mesh, dtype)
        self.programs.compile()
        self.state: ServingState = self.programs.create_state()
        self.counters = Counters()
        self._in_flight: deque[InFlight] = deque()
        self.prefix = PrefixCache(config, self.programs, self.counters, self._in_flight)
        self.scheduler = Scheduler(config, self.prefix)
        self.precision = str(config.precision)
        self._ids = itertools.count()
        self._events: list[Event] = []
        self._requests: dict[int, Request] = {}
        self._batch_key: tuple[int, ...] = ()
        self._batch_slots: Any = None
        self._place = replicated(mesh)

    # ---- the caller's side ----

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt (text or tokens); its id. UserError where it can never be served or the queue is full."""
        params = params or SamplingParams()
        tokens = self.model.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.check(tokens, params)
        return self.accept(Request(next(self._ids), tokens, params, self.model.stream_decoder()))

    def accept(self, request: Request, first: bool = False) -> int:
        """Queue a request that was checked, before all others if it is to be `first`; its id."""
        self._requests[request.id] = request
        (self.scheduler.waiting.appendleft if first else self.scheduler.waiting.append)(request)
        return request.id

    def check(self, tokens: list[int], params: SamplingParams) -> None:
        """UserError where such a request can never be served, or the queue is full now."""
        config, vocab = self.config, self.model.config.vocab
        room = min(config.max_context, config.num_pages * config.page_size)
        if not tokens:
            raise UserError("the prompt is empty; give at least one token")
        if bad := [t for t in tokens if not 0 <= t < vocab]:
            raise UserError(f"token {bad[0]} is outside the vocabulary of {vocab}")
        if bad := [t for t in params.stop_tokens if not 0 <= t < vocab]:
            raise UserError(f"stop token {bad[0]} is outside the vocabulary of {vocab}")
        if params.logprobs > config.logprobs:
            raise UserError(f"{params.logprobs} logprobs asked for, the engine gives at most {config.logprobs}")
        if len(tokens) + params.max_tokens > room:
            what = "context" if room == config.max_context else f"pool of {config.num_pages} pages"
            raise UserError(
                f"a prompt of {len(tokens)} tokens and {params.max_tokens} more exceed the {what} of {room} tokens; "
                "shorten the prompt or lower max_tokens"
            )
        if len(self.scheduler.waiting) + len(self._events) >= config.max_queue:  # what nobody fetches counts too
            raise UserError(f"the queue is full with {config.max_queue} requests; try again later")

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is; its pages are released. Harmless for one that has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, "cancelled")

    @property
    def under_way(self) -> dict[int, Request]:
        """Requests that have not ended, by id; not to be changed."""
        return self._requests

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running, or an event has not been handed out."""
        return bool(self._requests or self._events)

    @property
    def decoding(self) -> int:
        """Requests past their prefill."""
        return sum(r.status is Status.DECODE for r in self.scheduler.running)

    def kv_used(self) -> float:
        """The share of pages that requests hold, from 0 to 1."""
        return 1 - self.scheduler.free_pages / self.config.num_pages

    def synchronise(self) -> None:
        """Wait until the device has done everything that was dispatched."""
        jax.block_until_ready(self.state)

    def decode_slots(self):
        """The slots that decode next, as a step takes them, with nothing in flight: for measuring a step by itself."""
        self._drain()
        self.synchronise()
        return self._slots_of(self.scheduler.decodable())

    def step(self) -> list[Event]:
        """Move every request on by at most one token and one chunk; what became known since the last call."""
        self.counters.steps += 1
        self._admit()
        self._dispatch_prefill()
        self._dispatch_decode()
        while len(self._in_flight) > self._depth():
            self._read_next()
        self._settle()
        events, self._events = self._events, []
        return events

    def drop_prefixes(self) -> None:
        """Empty the prefix cache, but for pages that requests have."""
        self.state = self.prefix.evict(self.state, self.config.num_pages)

    def forget_gone(self) -> None:
        """Drop what has left for another worker and was not fetched."""

    def run(self) -> Iterator[Event]:
        """Events until nothing is left to do."""
        while self.busy:
            yield from self.step()

    # ---- dispatch ----

    def _depth(self) -> int:
        """Steps that may stay unread: one batch while something was dispatched after it, none when idle."""
        return 1 if self.scheduler.decodable() or self.scheduler.next_chunk() else 0

    def _admit(self) -> list[Request]:
        if self.scheduler.waiting and not self.scheduler.running:
            self._drain()  # what nobody waits for any more may hold pages
        admitted = self.scheduler.admit()
        if not admitted:
            return admitted
        self._evict(0)
        slots = np.full(self.config.max_slots, INVALID, np.int32)
        ids = np.full(self.config.max_slots, INVALID, np.int32)
        rows = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.state.sampling)
        for row, request in enumerate(admitted):
            slots[row], ids[row] = request.slot, request.id & 0x7FFFFFFF
            _fill_row(rows, row, request)
        self.state = self.programs.admit(self.state, slots, rows, ids)
        self.state = self.prefix.open(self.state, admitted)
        return admitted

    def _dispatch_prefill(self) -> None:
        chunk = self.scheduler.next_chunk()
        if chunk is None:
            return
        rows, width = chunk.shape
        slots, counts = np.full(rows, INVALID, np.int32), np.zeros(rows, np.int32)
        tokens, last = np.zeros((rows, width), np.int32), np.zeros(rows, bool)
        for row, (request, count) in enumerate(zip(chunk.requests, chunk.counts, strict=True)):
            slots[row], counts[row] = request.slot, count
            tokens[row, :count] = request.context[request.cached : request.cached + count]
            last[row] = request.cached + count == len(request.context)
        self._launch(self.programs.prefill, slots, (tokens, counts, last), chunk.requests, last.tolist())
        for request, count, is_last in zip(chunk.requests, chunk.counts, last[: len(chunk.counts)], strict=True):
            request.cached += count
            if is_last:
                request.status, request.dispatched = Status.DECODE, request.dispatched + 1
                self.state = self.prefix.keep(self.state, request)
        self.counters.prefill_tokens += int(counts.sum())

    def _dispatch_decode(self) -> None:
        batch = self.scheduler.decodable()
        while batch and self.scheduler.short_of_pages(batch):
            self._make_room()
            batch = self.scheduler.decodable()
        if not batch:
            return
        self._evict(self.scheduler.growth(batch))
        self._launch(self.programs.decode, self._slots_of(batch), (), batch, [True] * len(batch))
        for request in batch:
            request.cached += 1
            request.dispatched += 1
        self.counters.decode_tokens += len(batch)

    def _slots_of(self, batch: list[Request]):
        """The batch's slots on the device, in a bucket's size; kept while the batch stays the same."""
        key = tuple(r.slot for r in batch)
        if key != self._batch_key:
            size = min(n for n in self.config.decode_buckets if n >= len(batch))
            padded = np.array(key + (INVALID,) * (size - len(key)), np.int32)
            self._batch_key, self._batch_slots = key, spread(padded, self._place)
        return self._batch_slots

    def _launch(self, program, slots, inputs, requests: list[Request], emits: list[bool]) -> None:
        self.state, output = program(self.programs.params, self.state, slots, *inputs)
        for leaf in (output.status, output.tokens):
            leaf.copy_to_host_async()
        self._in_flight.append(InFlight(list(requests), [r.preemptions for r in requests], emits, output))

    def _make_room(self) -> None:
        """Preempt the youngest request, after reading what it already has coming."""
        self._drain()
        if self.scheduler.decodable() and self.scheduler.short_of_pages(self.scheduler.decodable()):
            self._send_back(self.scheduler.youngest())

    def _evict(self, more: int) -> None:
        """Have so many pages free beyond what is reserved."""
        self.state = self.prefix.evict(self.state, more - self.scheduler.free_pages)

    # ---- what came back ----

    def _drain(self) -> None:
        while self._in_flight:
            self._read_next()
        self._settle()

    def _read_next(self) -> None:
        self._settle()
        self._read(self._in_flight.popleft())

    def _settle(self) -> None:
        """Read what became of kept pages, up to the next step that is to be read. A request that was refused them waits
        and is computed without."""
        self.state, refused = self.prefix.settle(self.state)
        while refused is not None:
            self.counters.prefix_refusals += 1
            self._quarantine(INVALID)
            if refused.current:
                self._send_back(refused.request)
            self.state, refused = self.prefix.settle(self.state)

    def _read(self, step: InFlight) -> None:
        status, tokens = np.asarray(step.output.status).tolist(), np.asarray(step.output.tokens).tolist()
        wants = any(r.params.logprobs for r in step.requests)
        chances = jax.tree.map(np.asarray, step.output.logprobs) if wants else None
        logits = np.asarray(step.output.logits) if self.on_logits else None
        for row, request in enumerate(step.requests):
            if request.status is Status.DONE or request.preemptions != step.epochs[row]:
                continue  # ended or sent back since this step was dispatched
            if status[row] == MISMATCH:
                self._mismatch(request)
            elif status[row] == NO_PAGE:
                self._repair()
                self._send_back(request)
            elif step.emits[row]:
                if request.confirmed < len(request.output):
                    self._confirm(request, tokens[row])
                else:
                    if logits is not None and self.on_logits is not None:
                        self.on_logits(request.id, len(request.output), logits[row])
                    if chances is not None and (n := request.params.logprobs):
                        top = zip(chances.top_tokens[row, :n].tolist(), chances.top[row, :n].tolist(), strict=True)
                        request.logprobs.append(TokenLogprob(tokens[row], float(chances.chosen[row]), tuple(top)))
                    self._take_token(request, tokens[row])
                if request.status is Status.DECODE:
                    self._after_token(request)

    def _after_token(self, request: Request) -> None:
        """A token was read, and the request goes on."""

    def _take_token(self, request: Request, token: int) -> None:
        request.output.append(token)
        request.confirmed += 1
        text, reason = take_text(request, token, self.model.end_tokens)
        if not request.first_token_at:
            request.first_token_at = time.perf_counter()
        if not reason and len(request.output) >= request.params.max_tokens:
            reason = "length"
        if reason:
            self._complete(request, reason, text, (token,))
        else:
            self._events.append(Event(request.id, text, (token,)))

    def _complete(self, request: Request, reason: str, text: str, tokens: tuple[int, ...]) -> None:
        """End a request that has said all; with digests only if all its pages hold what was written to them."""
        request.ending = (reason, text, tokens)
        if self.config.integrity == "digest" and not self._audit(request).all():
            self._mismatch(request)
        else:
            self._finish(request, *request.ending)

    # ---- what failed its check ----

    def _audit(self, request: Request) -> np.ndarray:
        """Whether each page of the request holds what was written to it [columns]. Waits for the device."""
        return np.asarray(self.programs.audit(self.state, np.int32(request.slot)))

    def _mismatch(self, request: Request) -> None:
        """Set the request's pages aside; it ends here, or is computed anew once."""
        found = incident.inspect(
            self.state, self._audit(request), request.id, request.slot, self.counters.steps
        )
        again = self.config.on_mismatch == "recompute" and not request.recomputed
        found.log("recompute" if again else "abort")
        self.counters.mismatches += 1
        self.prefix.forget(request, found.pages[0].column if found.pages else 0)
        self._quarantine(request.slot)
        if again:
            self.counters.recomputed += 1
            request.recomputed = True
            request.confirmed = 0 if found.damaged else request.confirmed
            self._send_back(request)
        else:
            self._abort(request, str(found))

    def _abort(self, request: Request, error: str) -> None:
        """End a request for its pages' sake."""
        request.error = error
        self._finish(request, "integrity")

    def _confirm(self, request: Request, token: int) -> None:
        """Compare a token that was computed anew with the one that the request had at this place."""
        if token != request.output[request.confirmed]:
            self._abort(request, f"request {request.id}: tokens it had come out otherwise when computed anew")
            return
        request.confirmed += 1
        if request.confirmed == len(request.output) and request.ending is not None:
            self._complete(request, *request.ending)

    def _repair(self) -> None:
        """The device's free list contradicts the host's count: write it anew from the page tables."""
        self.counters.repairs += 1
        self._quarantine(INVALID)

    def _quarantine(self, slot: int) -> None:
        slots = np.full(self.config.max_slots, INVALID, np.int32)
        slots[0] = slot
        self.state, count = self.programs.quarantine(self.state, slots, self.prefix.held())
        self.counters.quarantined += int(count)

    def _send_back(self, request: Request) -> None:
        """Take a request's slot and pages away: it waits and is computed anew."""
        self.scheduler.leave(request)
        self._release(request)
        request.preemptions += 1
        request.status = Status.WAITING
        self.counters.preemptions += 1
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        self.scheduler.waiting.appendleft(request)

    def _finish(self, request: Request, reason: str, text: str = "", tokens: tuple[int, ...] = ()) -> None:
        """The one end of a request, whatever the reason: slot and pages are given back, the caller is told."""
        if request.ending is not None and request.ending[0] != reason:
            _withhold(request)
        running = request in self.scheduler.running
        self.scheduler.leave(request)
        if running:
            if reason in ("stop", "length"):
                self.state = self.prefix.keep(self.state, request)
            self._release(request)
        tail = request.held + request.decoder.flush() if reason not in ("stop", "integrity") else ""
        request.held = ""
        request.text += tail
        request.status, request.finish_reason, request.finished_at = Status.DONE, reason, time.perf_counter()
        del self._requests[request.id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        completion = replace(request.completion(), precision=self.precision)
        self._events.append(Event(request.id, text + tail, tokens, completion))

    def _release(self, request: Request) -> None:
        slots = np.full(self.config.max_slots, INVALID, np.int32)
        slots[0] = request.slot
        self.state = self.programs.release(self.state, slots)
        self.prefix.leave(request)
        request.slot = INVALID


def _withhold(request: Request) -> None:
    """Take back the text and tokens of an end that has not been shown, and never will be."""
    assert request.ending is not None
    _, text, tokens = request.ending
    request.text = request.text[: len(request.text) - len(text)]
    del request.output[len(request.output) - len(tokens) :]
    del request.logprobs[len(request.output) :]


def _fill_row(rows: SamplingState, row: int, request: Request) -> None:
    """A request's sampling settings into a row of host arrays."""
    params = request.params
    rows.temperature[row], rows.top_p[row] = params.temperature, params.top_p
    rows.top_k[row], rows.min_p[row] = params.top_k, params.min_p
    rows.seeds[row] = request.id & 0xFFFFFFFF if params.seed is None else params.seed
    rows.emitted[row], rows.logprobs[row] = request.confirmed, params.logprobs
    if request.confirmed:  # the token that a decode worker goes on from; otherwise the prefill gives it
        rows.last_token[row] = request.output[request.confirmed - 1]


def fit_to_model(config: EngineConfig, model: Model) -> EngineConfig:
    """`config` within what the model allows: its context, its number of log-probabilities."""
    return config.replace(
        max_context=min(config.max_context, model.config.max_position),
        logprobs=min(config.logprobs, model.config.vocab),
    )
