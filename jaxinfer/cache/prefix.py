"""The prefix tree: which kept page holds which tokens, after which others. On the host, in plain Python.

A node is one whole page: its token ids, the physical page and the tag under which the page was handed out. The way from
the root to a node spells a text from its first token. Children are found by their token ids and compared by them: a
hash only says where to look, so two texts with one hash never share a page (fault 17).

A node is in use while a request has its page; whoever has a page has all pages on the way to it. What nobody uses is
`idle` and evicted in order of last use, leaves first. There are never more nodes than pages.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """One kept page. `users` is how many requests have it."""

    tokens: tuple[int, ...]
    page: int
    tag: int
    parent: "Node | None"
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    users: int = 0


class PrefixTree:
    """A radix tree over token ids, a page to an edge."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.root = Node((), -1, 0, None)
        self.pages: dict[int, Node] = {}
        self.idle: OrderedDict[Node, None] = OrderedDict()  # least recently used first; a node after its descendants

    def __len__(self) -> int:
        return len(self.pages)

    def __contains__(self, node: Node) -> bool:
        return self.pages.get(node.page) is node

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The longest way that spells a beginning of `tokens`."""
        path: list[Node] = []
        for key in self._keys(tokens):
            child = (path[-1] if path else self.root).children.get(key)
            if child is None:
                break
            path.append(child)
        return path

    def acquire(self, path: list[Node]) -> None:
        """One more request has the pages of `path`, which begins at the root."""
        for node in path:
            node.users += 1
            self.idle.pop(node, None)

    def release(self, path: list[Node]) -> None:
        """One request less has them; what is idle now was used last of all."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self.idle[node] = None

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], tags: Sequence[int], taken: Sequence[bool]
    ) -> tuple[list[Node], list[int]]:
        """Enter whole pages of a text, of which the cache has taken a new hold where `taken`.

        Returns the text's way, which goes on as far as there is a page with a hold, and the columns whose new hold has
        no node: where another page has the same tokens already, that one stays, and this is a duplicate.
        """
        path: list[Node] = []
        for column, key in enumerate(self._keys(tokens)):
            parent = path[-1] if path else self.root
            child = parent.children.get(key)
            if child is None:
                if not taken[column]:
                    break
                child = Node(key, pages[column], tags[column], parent)
                parent.children[key] = self.pages[child.page] = child
            path.append(child)
        own = [column < len(path) and path[column].page == pages[column] for column in range(len(pages))]
        return path, [column for column, new in enumerate(taken) if new and not own[column]]

    def evict(self) -> Node | None:
        """Take out the leaf that nobody has used for longest; None where every node is in use."""
        if not self.idle:
            return None
        node, _ = self.idle.popitem(last=False)
        self._unlink(node)
        return node

    def forget(self, node: Node) -> None:
        """Take out a node and all that follow it, in use or not."""
        if node in self:
            self._unlink(node)
            for each in _subtree(node):
                self.pages.pop(each.page, None)
                self.idle.pop(each, None)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del self.pages[node.page]

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The token ids of each whole page."""
        size = self.page_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) // size * size, size))


def _subtree(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        waiting.extend(each.children.values())
        yield each
