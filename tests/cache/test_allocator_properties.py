"""Random lives of requests against a plain Python allocator, contents included.

The model keeps lists and sets and serves one row after the other. It takes the identity of new pages from
the state, after checking that they were free, and predicts everything else: grants, copies, tables, counts,
contents.
"""

from dataclasses import dataclass, field, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxinfer.cache import allocator, integrity, pages, sharing
from jaxinfer.cache.allocator import INVALID, AllocatorState

P, S, M, PAGE, ROWS = 10, 5, 4, 3, 4
MOST = PAGE * M + 1


# ---- the operations, compiled once


def _write_new(state, pool, slots, counts, grant, marks):
    """Copy what must be copied, then write the marks of the granted tokens at the end of their slots."""
    pool = pages.copy({"k": pool}, grant.copy_source, grant.copy_target, grant.copies)["k"]
    row = jnp.where(grant.granted, slots, INVALID)
    start = state.lengths[jnp.where(grant.granted, slots, 0)] - counts
    page, offset = allocator.positions_to_pages(state, row, start[:, None] + jnp.arange(MOST))
    pool = pages.write(pool, 0, page.reshape(-1), offset.reshape(-1), marks.reshape(-1, 1))
    return state, pool, grant


@jax.jit
def allocate(state, pool, slots, counts, marks):
    state, grant = allocator.allocate(state, slots, counts)
    return _write_new(state, pool, slots, counts, grant, marks)


@jax.jit
def append(state, pool, slots, counts, marks):
    state, grant = allocator.append(state, slots, counts)
    return _write_new(state, pool, slots, counts, grant, marks)


@jax.jit
def append_in_decode(state, pool, slots, counts, marks):
    state, grant = allocator.append(state, slots, counts, max_new_pages=1)
    return _write_new(state, pool, slots, counts, grant, marks)


fork = jax.jit(allocator.fork)
open_slots = jax.jit(allocator.open_slots)
release = jax.jit(allocator.release)
adopt, keep, drop = jax.jit(sharing.adopt), jax.jit(sharing.keep), jax.jit(sharing.drop)
verify = jax.jit(integrity.verify)
read = jax.jit(lambda pool, state: pages.gather(pool, 0, state.page_table, state.lengths))


# ---- the model


@dataclass
class Slot:
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Model:
    def __init__(self):
        self.slots = [Slot() for _ in range(S)]
        self.references = dict.fromkeys(range(P), 0)
        self.kept: set[int] = set()
        self.contents: dict[int, list[int]] = {}  # of every page that was whole when last looked at

    @property
    def free(self) -> set[int]:
        return {page for page, count in self.references.items() if count == 0}

    def append(self, slots, counts, marks, limit, table, only_empty):
        """Serve the rows in order; `table` is the page table afterwards. Returns (granted, copies)."""
        at_start, available = dict(self.references), self.free
        granted, copies, new, seen, blocked = [], [], [], set(), False
        for slot, count, mark in zip(slots, counts, marks, strict=True):
            granted.append(False)
            if not 0 <= slot < S or (only_empty and self.slots[slot].tokens):
                continue
            repeated, mine = slot in seen, self.slots[slot]
            seen.add(slot)
            if repeated or count < 0 or len(mine.tokens) + count > M * PAGE:
                continue
            fresh = -(-(len(mine.tokens) + count) // PAGE) - len(mine.pages)
            writes_tail = count > 0 and len(mine.tokens) % PAGE > 0
            if fresh + (writes_tail and at_start[mine.pages[-1]] > 1) > limit:
                continue
            copy = writes_tail and self.references[mine.pages[-1]] > 1
            need = fresh + copy
            blocked |= need > max(len(available) - len(new), 0)
            if blocked and need:
                continue
            granted[-1] = True
            if copy:
                old = mine.pages.pop()
                self.references[old] -= 1
                copies.append((old, int(table[slot][len(mine.pages)])))
            for _ in range(need):
                page = int(table[slot][len(mine.pages)])
                assert page in available, f"page {page} was handed out but is not free"
                assert page not in new, f"page {page} was handed out twice"
                new.append(page)
                mine.pages.append(page)
                self.references[page] = 1
            mine.tokens += [int(token) for token in mark[:count]]
        return granted, copies

    def fork(self, source, target):
        granted, seen = [], set()
        for a, b in zip(source, target, strict=True):
            good = 0 <= a < S and 0 <= b < S and a not in target and b not in seen
            good = good and not self.slots[b].tokens
            granted.append(good)
            seen.add(b)
            if good:
                self.slots[b] = Slot(list(self.slots[a].pages), list(self.slots[a].tokens))
                for page in self.slots[a].pages:
                    self.references[page] += 1
        return granted

    def release(self, slot):
        for page in self.slots[slot].pages:
            self.references[page] -= 1
        self.slots[slot] = Slot()

    def keep(self, slots, counts):
        """What is answered: for each column the page, and whether the hold is new."""
        found = []
        for slot, count in zip(slots, counts, strict=True):
            mine = self.slots[slot] if 0 <= slot < S else Slot()
            whole = mine.pages[: max(min(count, len(mine.tokens) // PAGE), 0)]
            taken = [page not in self.kept for page in whole]
            for page in (page for page, new in zip(whole, taken, strict=True) if new):
                self.kept.add(page)
                self.references[page] += 1
            found.append((whole, taken))
        return found

    def drop(self, page):
        self.kept.remove(page)
        self.references[page] -= 1

    def adopt(self, slots, rows, sound):
        """`sound`: of each row whether its pages have an owner and the tags that are given."""
        granted, at_start = [], [len(slot.tokens) for slot in self.slots]
        for row, slot in enumerate(slots):
            given, count = rows[row], len(rows[row])
            mine = self.slots[slot] if 0 <= slot < S else None
            good = mine is not None and slot not in slots[:row] and sound[row]
            good = good and (not at_start[slot] or count * PAGE <= at_start[slot])
            after = good and given + mine.pages[count:]
            granted.append(good and len(set(after)) == len(after))
        for row, slot in enumerate(slots):
            if granted[row]:
                mine, given = self.slots[slot], rows[row]
                for page in given:
                    self.references[page] += 1
                for page in mine.pages[: len(given)]:
                    self.references[page] -= 1
                mine.pages[: len(given)] = given
                mine.tokens[: len(given) * PAGE] = [token for page in given for token in self.contents[page]]
        return granted


# ---- the machine

a_slot = st.sampled_from([INVALID, *range(S), S])
rows_of_slots = st.lists(a_slot, min_size=ROWS, max_size=ROWS)
rows_of_counts = st.lists(st.integers(-1, MOST), min_size=ROWS, max_size=ROWS)
small_counts = st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS)


class Lives(RuleBasedStateMachine):
    @initialize(handed_out=st.sampled_from([0, 2**32 - 15]))
    def start(self, handed_out):
        """A new allocator, or one whose tag counters are about to wrap."""
        tags = allocator.scramble(np.uint32(handed_out) + np.arange(1, P + 1, dtype=np.uint32))
        self.state = replace(
            AllocatorState.create(P, S, M, PAGE),
            page_tags=tags,
            next_tag=jnp.uint32(handed_out + P + 1),
            slot_tags=tags[:S],
            next_slot_tag=jnp.uint32(handed_out + S + 1),
        )
        self.pool = pages.create({"k": (1, 1)}, P, PAGE, jnp.int32)["k"] - 1  # -1 is never written
        self.model, self.mark = Model(), 0
        self.gone: list[tuple[int, int]] = []  # (slot, slot tag) of requests that are over
        self.stale: set[tuple[int, int]] = set()  # (page, tag) that nobody may use again

    # -- helpers

    def tags(self, slots):
        table = np.asarray(self.state.slot_tags)
        return [int(table[slot]) if 0 <= slot < S else 0 for slot in slots]

    def remember_what_was_freed(self, before, free_before):
        tags = np.asarray(before.page_tags)
        self.stale |= {(page, int(tags[page])) for page in self.model.free - free_before}

    def unchanged(self, before, names=None):
        for name in names or [f.name for f in fields(before)]:
            np.testing.assert_array_equal(getattr(self.state, name), getattr(before, name), err_msg=name)

    def run(self, operation, slots, counts, limit, only_empty):
        before, tags = self.state, np.asarray(self.state.slot_tags)
        self.mark += 1
        marks = self.mark * 1000 + np.arange(ROWS * MOST, dtype=np.int32).reshape(ROWS, MOST)
        marks_to_write = np.where(np.arange(MOST) < np.array(counts)[:, None], marks, 0)
        self.state, self.pool, grant = operation(before, self.pool, np.int32(slots), np.int32(counts), marks_to_write)
        table = np.asarray(self.state.page_table)
        granted, copies = self.model.append(slots, counts, marks, limit, table, only_empty)
        assert np.asarray(grant.granted).tolist() == granted
        count = int(grant.copies)
        found = np.stack([grant.copy_source, grant.copy_target], axis=1)
        assert found[:count].tolist() == [list(pair) for pair in copies]
        assert np.all(found[count:] == INVALID)
        if not any(granted):
            self.unchanged(before)
        renewed = {slot for slot, good in zip(slots, granted, strict=True) if good and only_empty}
        assert set(np.flatnonzero(np.asarray(self.state.slot_tags) != tags).tolist()) == renewed

    # -- rules

    @rule(slots=rows_of_slots, counts=rows_of_counts)
    def allocate(self, slots, counts):
        self.run(allocate, slots, counts, M, only_empty=True)

    @rule(slots=rows_of_slots, counts=rows_of_counts)
    def append(self, slots, counts):
        self.run(append, slots, counts, M, only_empty=False)

    @rule(slots=st.permutations([*range(S), INVALID]), counts=small_counts)
    def decode(self, slots, counts):
        self.run(append_in_decode, slots[:ROWS], counts, 1, only_empty=False)

    @rule(source=rows_of_slots, into=rows_of_slots)
    def fork(self, source, into):
        before = self.state
        self.state, granted = fork(before, np.int32(source), np.int32(into))
        assert np.asarray(granted).tolist() == self.model.fork(source, into)
        if not np.any(granted):
            self.unchanged(before)

    @rule(slots=rows_of_slots)
    def open(self, slots):
        before = self.state
        self.state, opened = open_slots(before, np.int32(slots))
        empty = [0 <= slot < S and not self.model.slots[slot].tokens for slot in slots]
        assert np.asarray(opened).tolist() == [
            good and slot not in slots[:row] for row, (slot, good) in enumerate(zip(slots, empty, strict=True))
        ]
        names = {f.name for f in fields(before)} - {"slot_tags", "next_slot_tag"}
        self.unchanged(before, names)

    @rule(slots=rows_of_slots, with_tags=st.booleans(), again=st.booleans())
    def release(self, slots, with_tags, again):
        before, free_before, tags = self.state, self.model.free, self.tags(slots)
        arguments = [np.int32(slots)] + ([np.uint32(tags)] if with_tags else [])
        self.state = release(before, *arguments)
        for slot, tag in zip(slots, tags, strict=True):
            if 0 <= slot < S:
                self.model.release(slot)
                self.gone.append((slot, tag))
        self.remember_what_was_freed(before, free_before)
        if again:
            once = self.state
            self.state = release(once, *arguments)
            names = {f.name for f in fields(once)} - (set() if with_tags else {"slot_tags", "next_slot_tag"})
            self.unchanged(once, names)

    @rule(slots=rows_of_slots, counts=rows_of_counts)
    def keep(self, slots, counts):
        before = self.state
        self.state, hold = keep(before, np.int32(slots), np.int32(counts))
        tags = np.asarray(before.page_tags)
        for row, (whole, taken) in enumerate(self.model.keep(slots, counts)):
            rest = M - len(whole)
            assert np.asarray(hold.pages)[row].tolist() == whole + [INVALID] * rest
            assert np.asarray(hold.tags)[row].tolist() == [int(tags[page]) for page in whole] + [0] * rest
            assert np.asarray(hold.taken)[row].tolist() == taken + [False] * rest

    @rule(drawn=st.lists(st.tuples(st.integers(-1, P), st.sampled_from([0, 0, 0, 1])), min_size=M, max_size=M))
    def drop(self, drawn):
        """Some under a tag that is not theirs, some twice, some that are not kept or are none."""
        before, free_before = self.state, self.model.free
        tags = np.append(np.asarray(before.page_tags), np.uint32([0, 0]))
        wanted = [int(tags[page]) + wrong & 0xFFFFFFFF for page, wrong in drawn]
        self.state = drop(before, np.int32([page for page, _ in drawn]), np.uint32(wanted))
        for page, wrong in drawn:
            if page in self.model.kept and not wrong:
                self.model.drop(page)
        self.remember_what_was_freed(before, free_before)

    @rule(slots=rows_of_slots, data=st.data())
    def adopt(self, slots, data):
        """Pages that are kept, of other slots, or anything; now and then under a tag that is not theirs."""
        whole = [page for slot in self.model.slots for page in slot.pages[: len(slot.tokens) // PAGE]]
        some = st.sampled_from(sorted({*whole, *self.model.kept}) or [0])
        a_row = st.lists(some, max_size=M) | st.lists(st.integers(0, P - 1), max_size=M)
        rows = [data.draw(a_row) for _ in slots]
        wrong = data.draw(st.sampled_from([0, 0, 0, 1]))
        before, free_before = self.state, self.model.free
        tags = np.asarray(before.page_tags)
        filled = np.int32([row + [INVALID] * (M - len(row)) for row in rows])
        asked = np.where(filled >= 0, tags[filled], 0).astype(np.uint32)
        asked[0, 0] += wrong
        allowed = set(whole) | self.model.kept
        # Pages with an owner that are not whole are the caller's mistake: the engine gives none.
        filled = np.where(np.isin(filled, list(allowed | self.model.free)), filled, INVALID)
        rows = [[int(page) for page in row if page >= 0] for row in filled]
        sound = [
            list(filled[i]) == row + [INVALID] * (M - len(row))
            and all(page in allowed for page in row)
            and not (i == 0 and wrong and row)
            for i, row in enumerate(rows)
        ]
        self.state, granted = adopt(before, np.int32(slots), filled, asked)
        assert np.asarray(granted).tolist() == self.model.adopt(slots, rows, sound)
        if not np.any(granted):
            self.unchanged(before)
        self.unchanged(before, ["slot_tags", "page_tags", "kept"])
        self.remember_what_was_freed(before, free_before)

    @rule(data=st.data())
    def release_late(self, data):
        """Requests that are over, some of them twice: nothing may happen."""
        if not self.gone:
            return
        late = data.draw(st.lists(st.sampled_from(self.gone), min_size=ROWS, max_size=ROWS))
        slots, tags = zip(*late, strict=True)
        before = self.state
        self.state = release(before, np.int32(slots), np.uint32(tags))
        self.unchanged(before)
        assert not np.any(verify(before, np.int32(slots), np.uint32(tags)))

    # -- what must always hold

    @invariant()
    def state_is_sound(self):
        assert integrity.check_invariants(self.state) == []
        assert int(self.state.free_count) == len(self.model.free)
        assert np.asarray(self.state.reference_counts).tolist() == list(self.model.references.values())
        assert set(np.flatnonzero(np.asarray(self.state.kept)).tolist()) == self.model.kept
        table = [slot.pages + [INVALID] * (M - len(slot.pages)) for slot in self.model.slots]
        assert np.asarray(self.state.page_table).tolist() == table
        assert np.asarray(self.state.lengths).tolist() == [len(slot.tokens) for slot in self.model.slots]

    @invariant()
    def everybody_reads_what_he_wrote(self):
        found = np.asarray(read(self.pool, self.state))[:, :, 0]
        for slot, mine in enumerate(self.model.slots):
            assert found[slot].tolist() == mine.tokens + [0] * (M * PAGE - len(mine.tokens))
            for column in range(len(mine.tokens) // PAGE):
                self.model.contents[mine.pages[column]] = mine.tokens[column * PAGE : (column + 1) * PAGE]

    @invariant()
    def tags_tell_holders_from_the_rest(self):
        assert np.asarray(verify(self.state, np.arange(S, dtype=np.int32))).all()
        tags, counts = np.asarray(self.state.page_tags), np.asarray(self.state.reference_counts)
        for page, tag in self.stale:
            assert counts[page] == 0 or tags[page] != tag, f"a former holder of page {page} verifies again"


Lives.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLives = Lives.TestCase
