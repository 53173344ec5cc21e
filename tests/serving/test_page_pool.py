"""Pages that hold tokens: none is lost, given back twice, or written while it is shared."""

import types

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from jspec.generation.request import SamplingParams
from jspec.generation.rows import Row
from jspec.kernels import PAGE
from jspec.serving.slots import BatchSlots, PagePool

MOST, BLOCK = 6 * PAGE, 5  # tokens of a request, and of a round


class Reading:
    """A prompt that is read chunk by chunk."""

    def __init__(self, prompt, chunks, num_found):
        self.prompt, self.chunks, self.num_read = prompt, chunks, num_found

    @property
    def next_chunk(self):
        return self.chunks[self.num_read]

    @property
    def is_done(self):
        return self.num_read == len(self.chunks)


class Device:
    """Stands for a `PagedBatch`: a token in each slot instead of keys and values.

    `is_shared` tells of a part's page whether it may be written no more. The drafter has read as
    much of a row as `draft_lengths` says: in every fourth row it lags.
    """

    page_bytes, num_pages, has_memory, keeps_answers = (1, 1), 14, False, True

    def __init__(self, num_rows):
        self.rows, self.lengths = range(num_rows), np.zeros(num_rows, int)
        self.contents = np.full((2, self.num_pages + 1, PAGE), -1)
        self.pages = {row: [[], []] for row in self.rows}
        self.texts, self.is_shared = {}, lambda part, page: False
        self.draft_lengths = {}

    def warm_up(self, widest):
        pass

    def chunks(self, num_tokens, widest):
        return [(begin, PAGE) for begin in range(0, num_tokens, PAGE)]

    def needed(self, length, max_length, num_rounds=1):
        end = min(length + num_rounds * BLOCK, max_length + BLOCK)
        return [-(-end // PAGE)] * 2

    def begin_in(self, request, pages, widest, snapshots, is_scored, *, calls, draft_length):
        self.reading_pages = pages
        assert draft_length < len(request.prompt)
        assert self.holds(1, pages[1], request.prompt[:draft_length])
        self.reading_draft_length = draft_length
        assert calls == self.chunks(len(request.prompt), widest)
        return Reading(request.prompt, calls, len(snapshots))

    def snapshot(self, reading, begin, width):
        return ()

    def snapshot_of(self, row, begin, width):
        assert begin + width <= len(self.texts[row])
        return ()

    def shares_drafter_pages(self, request=None):
        return True

    def draft_length(self, row):
        return self.draft_lengths[row]

    def write(self, part, pages, begin, tokens):
        slots = begin + np.arange(len(tokens))
        numbers = np.array(pages)[slots // PAGE]
        assert numbers.min() > 0
        assert not any(self.is_shared(part, page) for page in set(numbers.tolist()))
        self.contents[part, numbers, slots % PAGE] = tokens

    def holds(self, part, pages, tokens):
        stored = self.contents[part, pages].ravel()[: len(tokens)]
        return stored.tolist() == list(tokens)

    def read(self, reading):
        begin, width = reading.next_chunk
        new = reading.prompt[begin : begin + width]
        self.write(0, self.reading_pages[0], begin, new)
        reading.num_read += 1
        return len(new)

    def insert(self, row, reading):
        self.pages[row], self.texts[row] = self.reading_pages, list(reading.prompt)
        self.lengths[row] = len(reading.prompt)
        # The drafter reads the prompt in the first round.
        begin = self.draft_lengths[row] = self.reading_draft_length
        if row % 4 != 1:
            self.write(1, self.pages[row][1], begin, reading.prompt[begin:])
            self.draft_lengths[row] = len(reading.prompt)
        return "the first token"

    def insert_saved(self, row, reading, saved):
        assert saved == reading.prompt
        self.insert(row, reading)

    def save(self, row):
        return list(self.texts[row])

    def set_pages(self, row, pages):
        self.pages[row] = pages

    def run(self, num_rounds):
        rng = np.random.default_rng(sum(self.lengths))
        for row, text in self.texts.items():
            for _ in range(num_rounds):
                if len(text) + 1 < MOST:
                    drafts = rng.integers(1, 9, BLOCK).tolist()
                    for part in range(2 if row % 4 != 1 else 1):
                        self.write(part, self.pages[row][part], len(text), drafts)
                    text += drafts[: min(1 + rng.integers(BLOCK), MOST - 1 - len(text))]
            self.lengths[row] = len(text)
            if row % 4 != 1:
                self.draft_lengths[row] = len(text)

    def finish(self, row):
        del self.texts[row]
        self.pages[row] = [[], []]


class Machine(RuleBasedStateMachine):
    """Requests that come, run, wait for pages, and go; prompts begin alike or not."""

    def __init__(self, tree_pages=100):
        super().__init__()
        self.device = Device(4)
        self.slots = BatchSlots(self.device, tree_pages, PAGE)
        self.device.is_shared = lambda part, page: page in self.shared()[part]
        self.reading, self.order, self.waiting, self.num_paused = None, [], [], 0

    def shared(self):
        nodes = [node.page for node in self.slots.tree._by_use]
        target = [page for node in nodes for page in node.pages]
        return target, [page for node in nodes for page in node.draft_pages]

    @rule(kind=st.integers(0, 2), length=st.integers(1, 5 * PAGE))
    def come(self, kind, length):
        text = [kind] * 70 + [kind + length % 3] * length
        self.waiting.append((text[:length], None))

    @rule()
    def read(self):
        free = [row for row in self.slots.rows if row not in self.order]
        if self.reading is None and free and self.waiting:
            prompt, saved = self.waiting[0]
            row = Row(SamplingParams(), prompt, (0,), MOST)
            if self.slots.begin(free[0], row, saved) is None:
                assert self.order, "there is always room for one"
                return
            del self.waiting[0]
            self.reading = (free[0], prompt, saved)
            self.order.append(free[0])
        if self.reading is not None and self.slots.read(self.reading[0])[1] is not None:
            self.reading = None

    @rule(num_rounds=st.integers(1, 20), more=st.integers(0, 40))
    def visit(self, num_rounds, more=0):
        left = list(self.order)
        for row in list(left):
            is_reading = self.reading is not None and row == self.reading[0]
            while row in self.order and not is_reading and not self.slots.reserve(row, num_rounds):
                self.pause(left.pop())
        read = [row for row in self.order if self.reading is None or row != self.reading[0]]
        before = self.slots.tree.num_bytes
        if all(self.slots.reserve(row, num_rounds + more, is_extra=True) for row in read):
            num_rounds += more
        assert self.slots.tree.num_bytes == before, "a longer visit costs cached prompts"
        self.slots.run(num_rounds)

    def pause(self, row):
        if self.reading is not None and row == self.reading[0]:
            _, text, before = self.reading
            self.waiting.insert(0, (text, before))
            self.reading = None
            assert self.slots.pause(row) is before, "what was saved once is lost"
        else:
            saved = self.slots.pause(row)
            self.waiting.insert(0, (saved, saved))
        self.order.remove(row)
        self.num_paused += 1

    @rule(number=st.integers(0, 99))
    def end(self, number):
        if self.order:
            row = self.order.pop(number % len(self.order))
            # The newest token of a text has no slot yet.
            text = [*self.device.texts.get(row, ()), 0]
            self.slots.finish(row, text=text if number % 3 else ())
            if self.reading is not None and self.reading[0] == row:
                self.reading = None

    @invariant()
    def every_page_is_free_or_has_one_owner(self):
        shared = self.shared()
        for part, pool in enumerate(self.slots.pools):
            held_pages = [page for held in self.slots._held.values() for page in held.private[part]]
            everything = [*pool._free, *held_pages, *shared[part]]
            assert sorted(everything) == list(range(1, pool.num_pages + 1))
        assert 0 <= self.slots.usage <= 1

    @invariant()
    def every_node_holds_its_tokens(self):
        """So no draft that was rejected is in the tree."""
        tree = self.slots.tree
        assert tree.num_bytes == sum(map(len, self.shared()))
        assert tree.num_bytes <= tree.max_bytes
        for node in tree._by_use:
            assert self.device.holds(0, node.page.pages, node.chunk)
            if node.page.draft_pages:
                assert self.device.holds(1, node.page.draft_pages, node.parent.chunk)

    @invariant()
    def every_row_finds_its_text(self):
        for row, text in self.device.texts.items():
            read = text, text[: self.device.draft_lengths[row]]
            for part in range(2):
                assert self.device.holds(part, self.device.pages[row][part], read[part])

    def teardown(self):
        for row in list(self.order):
            self.slots.finish(row)
        self.slots.tree.clear()
        assert [pool.num_free for pool in self.slots.pools] == [Device.num_pages] * 2


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


def drive(num_steps, seed, tree_pages=100):
    """Drives the machine by chance, checking all of it every hundred steps."""
    machine, rng = Machine(tree_pages), np.random.default_rng(seed)
    for step in range(num_steps):
        action, kind, number = rng.integers([12, 3, 5 * PAGE]).tolist()
        if action == 0 and len(machine.waiting) < 8:
            machine.come(kind, 1 + number)
        elif action == 1 and number < 2 * PAGE:
            machine.end(number)
        elif action < 6:
            machine.read()
        else:
            machine.visit(1 + number % 20, more=number % 3 * 10)
        if step % 100 == 0:
            machine.every_page_is_free_or_has_one_owner()
            machine.every_node_holds_its_tokens()
            machine.every_row_finds_its_text()
    assert machine.num_paused > num_steps / 1000
    assert machine.slots.tree.num_evicted > num_steps / 1000 or not tree_pages
    machine.teardown()


@pytest.mark.parametrize("tree_pages", [7, 100])
def test_thousands_of_operations(tree_pages):
    drive(3_000 if tree_pages == 100 else 1_000, seed=0, tree_pages=tree_pages)


def test_what_a_long_visit_did_not_need_is_taken_back():
    """Guards against answers that are paused because others hold pages that they may never need."""
    slots = BatchSlots(Device(1), 0, PAGE)
    slots.begin(0, Row(SamplingParams(), [1, 2], (0,), MOST))
    slots.read(0)
    assert slots.reserve(0, 1)
    held = slots.usage
    assert slots.reserve(0, 2 * PAGE, is_extra=True)
    assert slots.usage > held
    assert slots.reserve(0, 1)
    assert slots.usage == held


def test_answers_of_drafters_that_count_are_not_kept():
    device = Device(1)
    slots = BatchSlots(device, 100, PAGE)
    for device.keeps_answers, count in ((False, 0), (True, 2)):
        slots.begin(0, Row(SamplingParams(), [1, 2], (0,), MOST))
        slots.read(0)
        while device.lengths[0] < 2 * PAGE + 4:
            slots.reserve(0, 5)
            slots.run(5)
        slots.finish(0, text=[*device.texts[0][: 2 * PAGE + 3]])
        assert len(slots.tree) == count


def test_a_drafters_slot_follows_from_the_next_token_too():
    """That of a pair of tokens, at the end of a page: texts that part there share no such page."""
    device = Device(1)
    slots = BatchSlots(device, 100, PAGE)
    beginning, first, second = ([word] * PAGE for word in (1, 2, 3))

    def ask(prompt):
        slots.begin(0, Row(SamplingParams(), prompt, (0,), MOST))
        while slots._reading is not None:
            slots.read(0)
        slots.finish(0, text=[*prompt, 5])
        return device.reading_draft_length, device.reading_pages[1][0]

    (_, (length, page)), (_, (other_length, other_page)) = (
        [ask([*beginning, *rest, 4]) for _ in range(2)] for rest in (first, second)
    )
    assert (length, other_length) == (PAGE, PAGE)
    assert page != other_page


@pytest.mark.slow
@pytest.mark.parametrize("tree_pages", [0, 5, 100])
def test_a_million_operations(tree_pages):
    drive(1_000_000 if tree_pages == 100 else 50_000, seed=1, tree_pages=tree_pages)


def test_a_device_that_writes_where_it_must_not_is_seen():
    """The control of the tests above: a row that writes from slot 0 on writes a shared page."""
    machine = Machine()
    for _ in range(2):
        machine.waiting.append(([1] * 200, None))
    for _ in range(6):
        machine.read()
    machine.device.run = types.MethodType(
        lambda self, n: self.write(0, self.pages[1][0], 0, [7]), machine.device
    )
    with pytest.raises(AssertionError):
        machine.visit(1)


def test_a_page_cannot_be_given_back_twice():
    pool = PagePool(4)
    pages = pool.take(3)
    assert (pages, pool.num_free) == ([1, 2, 3], 1)
    pool.truncate_to(pages, 1)
    assert (pages, pool.num_free) == ([1], 3)
    assert pool.take(1) == [2]
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back([3])
    with pytest.raises(AssertionError, match="more pages are taken"):
        pool.take(3)
