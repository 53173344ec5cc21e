"""The tree of prompts' pages: no page is lost, dropped twice, or dropped while it is needed."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jspec.serving.prefix_tree import PrefixTree, path

MAX_BYTES = 40
_CHUNKS = st.integers(0, 2).map(lambda token: (token,) * 4)


def nodes_of(tree):
    nodes, waiting = [], [tree.root]
    while waiting:
        node = waiting.pop()
        nodes += node.children.values()
        waiting += node.children.values()
    return nodes


def check(tree, readers=()):
    """Checks what must always be so; `readers` are the nodes at which somebody stands."""
    nodes = nodes_of(tree)
    assert len(tree) == len(nodes) == len(set(nodes))
    assert tree.num_bytes == sum(node.num_bytes for node in nodes) <= tree.max_bytes
    for node in nodes:
        assert node.parent.children[node.chunk] is node
    for node in readers:
        assert all(one in nodes for one in path(node))
    pins = sum(node.num_pins for node in [*nodes, tree.root])
    assert pins == len(readers)


class Machine(RuleBasedStateMachine):
    """Readings that come, go on and go, beside a dictionary that knows every page ever made."""

    def __init__(self):
        super().__init__()
        self.tree, self.readers, self.pages = PrefixTree(MAX_BYTES), [], {}

    def text(self, node):
        return tuple(node_of_path.chunk for node_of_path in path(node))

    @rule()
    def begin(self):
        self.tree.pin(self.tree.root)
        self.readers.append(self.tree.root)

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 99), chunk=_CHUNKS, size=st.integers(1, 15))
    def go_on(self, number, chunk, size):
        number %= len(self.readers)
        node = self.readers[number]
        child = self.tree.find(node, chunk)
        if child is None:
            page, text = object(), (*self.text(node), chunk)
            child = self.tree.add(node, chunk, page, size)
            if child is None:
                return
            self.pages[text] = page
        assert child.page is self.pages[self.text(child)], "another prompt's page"
        self.tree.pin(child)
        self.tree.unpin(node)
        self.readers[number] = child

    @precondition(lambda self: self.readers)
    @rule(number=st.integers(0, 99))
    def end(self, number):
        self.tree.unpin(self.readers.pop(number % len(self.readers)))

    @invariant()
    def all_is_well(self):
        check(self.tree, self.readers)

    def teardown(self):
        for node in self.readers:
            self.tree.unpin(node)
        self.tree.clear()
        assert (len(self.tree), self.tree.num_bytes) == (0, 0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def test_the_page_used_longest_ago_goes_first():
    tree = PrefixTree(30)
    a, _b, c = (tree.add(tree.root, (n,), n, 10) for n in range(3))
    assert tree.find(tree.root, (0,)) is a
    tree.add(tree.root, (3,), 3, 10)
    assert [node.page for node in nodes_of(tree)] == [0, 2, 3]
    tree.add(c, (4,), 4, 10)  # in the place of 0: what is added to is in use
    assert sorted(node.page for node in nodes_of(tree)) == [2, 3, 4]
    assert tree.num_evicted == 2


def test_a_page_that_others_follow_stays_longer_than_they():
    """Guards against pages that nobody can reach any more."""
    tree = PrefixTree(30)
    first = tree.add(tree.root, (0,), 0, 10)
    tree.add(first, (1,), 1, 10)
    tree.add(tree.root, (2,), 2, 10)
    tree.add(tree.root, (3,), 3, 10)
    assert sorted(node.page for node in nodes_of(tree)) == [0, 2, 3]


def test_what_is_pinned_stays_even_where_nothing_else_can_be_added():
    tree = PrefixTree(20)
    first = tree.add(tree.root, (0,), 0, 10)
    tree.pin(first)
    second = tree.add(first, (1,), 1, 10)
    tree.pin(second)
    assert tree.add(tree.root, (2,), 2, 10) is None
    tree.unpin(second)
    assert tree.add(first, (3,), 3, 10) is not None
    assert sorted(node.page for node in nodes_of(tree)) == [0, 3]
    assert tree.add(tree.root, (4,), 4, 21) is None
    assert len(tree) == 2, "nothing was dropped for a page that has no room anyway"


def test_a_budget_of_nothing_keeps_nothing():
    tree = PrefixTree(0)
    assert tree.add(tree.root, (0,), 0, 1) is None
    assert len(tree) == 0
