"""Suffix decoding as Arctic Inference does it (arXiv 2411.04975;
`csrc/suffix_decoding/suffix_tree.cc`), to be replayed.

Two trees of all suffixes, cut at a depth: one of the request's prompt and answer, one of the
answers of all requests so far. A node counts how often its tokens occur. For every suffix of the
context that occurs, the most frequent continuation is followed while the product of its shares
stays at or above LEAST_PROBABILITY, for at most FACTOR tokens per token matched; the sum of
these products is its score. The highest score drafts; of equal ones the longer match, and the
request's own tree.

A node that one suffix alone passes keeps a place in that suffix's text instead of children.
Children of equal count stand in the order of the original's sibling list, and scores are float32 as
there, so that ties fall alike: on 139,380 random contexts both drafted the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

_ZERO: Final = np.float32(0.0)
_ONE: Final = np.float32(1.0)


# vLLM's `suffix_decoding_max_tree_depth`, `_max_spec_factor`, `_min_token_prob`, at its defaults
DEPTH: Final = 24
FACTOR: Final = 1.0
LEAST_PROBABILITY: Final = 0.1


class _Node:
    """`count` suffixes pass here. More than one: `children` by token, most frequent first in
    `order`. One: what follows is in `text` from `at` on."""

    __slots__ = ("at", "children", "count", "order", "text")

    def __init__(self, text: list[int], at: int) -> None:
        self.count = 1
        self.text, self.at = text, at
        self.children: dict[int, _Node] = {}
        self.order: list[int] = []

    def enter(self, last: bool) -> None:
        """One more suffix passes; `last`: the tree is not deeper than this node."""
        if self.count == 1 and self.at < len(self.text) and not last:
            token = self.text[self.at]
            self.children[token] = _Node(self.text, self.at + 1)
            self.order.append(token)
        self.count += 1

    def rise(self, token: int) -> None:
        """Keep `order` when the child of `token` is about to be entered once more: it moves before
        the children that it reaches, as the original moves it."""
        order, count = self.order, self.children[token].count
        place = order.index(token)
        if place == 0:
            return
        ahead = self.children[order[place - 1]].count
        if ahead > count + 1:
            return
        first = place - 1
        while first > 0 and self.children[order[first - 1]].count == ahead:
            first -= 1
        order.insert(first, order.pop(place))


class SuffixTree:
    """The suffixes of some texts, each at most DEPTH tokens long. Texts are added one after the
    other, token by token."""

    def __init__(self) -> None:
        self._root = _Node([], 0)
        self.open()

    def open(self) -> None:
        self._text: list[int] = []
        # Suffixes of the text that others share, longest first: where they end. Those that stand
        # alone need no place.
        self._ends: list[tuple[int, _Node]] = []

    @property
    def length(self) -> int:
        return len(self._text)

    def append(self, token: int) -> None:
        text = self._text
        text.append(token)
        ends, end = [], len(text)
        for start, node in (*self._ends, (end - 1, self._root)):
            depth = end - start
            child = node.children.get(token)
            if child is None:
                node.children[token] = _Node(text, end)
                if node is not self._root:
                    node.order.append(token)
                continue
            if node is not self._root:
                node.rise(token)
            child.enter(depth >= DEPTH)
            if depth < DEPTH:
                ends.append((start, child))
        self._ends = ends

    def matches(self, context: Sequence[int]) -> Iterator[tuple[int, _Node]]:
        """(length, node) of the suffixes of `context` that occur elsewhere too, shortest first.
        `context` ends as the open text does; what is not of that text is looked up from the
        root."""
        for start, node in reversed(self._ends):
            if self.length - start >= len(context):
                return
            yield self.length - start, node
        if len(self._ends) < self.length:
            return  # a suffix within the text occurs only once already, so longer ones do
        for size in range(self.length + 1, len(context)):
            found = self._find(context[len(context) - size :])
            if found is None:
                return
            yield size, found

    def _find(self, tokens: Sequence[int]) -> _Node | None:
        """The node of `tokens`; None where they do not occur."""
        node = self._root
        for position, token in enumerate(tokens):
            if node.count == 1 and node is not self._root:
                rest = node.text[node.at : node.at + len(tokens) - position]
                if rest != list(tokens[position:]):
                    return None
                return _Node(node.text, node.at + len(rest))
            child = node.children.get(token)
            if child is None:
                return None
            node = child
        return node

    def path(self, node: _Node, matched: int, most: int) -> tuple[list[int], list[np.float32]]:
        """At most `most` tokens that most often follow `node`, `matched` deep, and the score of the
        first 1, 2, ... of them."""
        tokens: list[int] = []
        scores: list[np.float32] = []
        share, score = _ONE, _ZERO
        while len(tokens) < most:
            if node.count == 1:
                left = min(most - len(tokens), DEPTH - matched - len(tokens))
                for token in node.text[node.at : node.at + max(left, 0)]:
                    score = score + share
                    tokens.append(token)
                    scores.append(score)
                break
            if not node.order:
                break
            child = node.children[node.order[0]]
            share = share * (np.float32(child.count) / np.float32(node.count))
            if share < np.float32(LEAST_PROBABILITY):
                break
            score = score + share
            tokens.append(node.order[0])
            scores.append(score)
            node = child
        return tokens, scores


class SuffixReader:
    """One request in the course of its answer; `everyone`: the tree that all requests share. The
    request before is over."""

    def __init__(self, everyone: SuffixTree, prompt: Sequence[int]) -> None:
        self._own, self._everyone = SuffixTree(), everyone
        for token in prompt:
            self._own.append(token)
        self._recent = list(prompt[-DEPTH:])
        self._everyone.open()

    def write(self, token: int) -> None:
        self._own.append(token)
        self._everyone.append(token)
        self._recent = [*self._recent, token][-DEPTH:]

    def propose(self, gammas: Sequence[int]) -> dict[int, list[int]]:
        """What would be drafted now, for each gamma."""
        own, others = (self._best(tree, gammas) for tree in (self._own, self._everyone))
        return {gamma: max(own[gamma], others[gamma], key=lambda f: f[0])[1] for gamma in gammas}

    def _best(
        self, tree: SuffixTree, gammas: Sequence[int]
    ) -> dict[int, tuple[np.float32, list[int]]]:
        """gamma -> (score, tokens) of the best match in a tree."""
        longest = max(gammas)
        best: dict[int, tuple[np.float32, list[int]]] = {gamma: (_ZERO, []) for gamma in gammas}
        for size, node in tree.matches(self._recent):
            most = int(np.float32(size) * np.float32(FACTOR) + np.float32(1e-6))
            tokens, scores = tree.path(node, size, min(most, longest))
            for gamma in gammas:
                score = scores[min(gamma, len(scores)) - 1] if scores else _ZERO
                if score >= best[gamma][0]:
                    best[gamma] = (score, tokens[:gamma])
        return best
