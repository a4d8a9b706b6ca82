"""BM25 over passages, in numpy: for the 20 of a question in memory, for many from a folder on disk.

A term is a run of letters or digits, case-folded; a passage is indexed as its title and its text. The
index is a vocabulary and arrays (.npy, mapped, never pickled), so that a service opens it in no time.
Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework" (2009), idf as in Lucene.
"""

import json
import re
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

K1, B = 1.2, 0.75  # saturation and length normalisation, unitless; Lucene's defaults
VERSION = 1  # of the layout on disk
ARRAYS = ("starts", "docs", "counts", "lengths")
MAX_QUERY_TERMS = 64  # distinct terms of a query that count, the first ones; bounds the work of a search


@dataclass(frozen=True, slots=True)
class Passage:
    label: str  # what a result shows in brackets: the idx of a record, or the place in a result
    title: str
    text: str


def terms(text: str) -> list[str]:
    """Terms of a text, in order."""
    return re.findall(r"[^\W_]+", text.casefold())


class Bm25:
    """An index of texts by number. Reading it changes nothing, so threads may share it.

    vocabulary  term -> its number
    starts      (V + 1,) int64; term t's postings are docs[starts[t]:starts[t + 1]], counts likewise
    docs        (P,) int32, ascending within a term
    counts      (P,) int32, times the term stands in the text
    lengths     (N,) int32, terms of each text
    """

    def __init__(self, vocabulary: dict[str, int], starts, docs, counts, lengths):
        self.vocabulary, self.starts, self.docs, self.counts = vocabulary, starts, docs, counts
        self.lengths = lengths
        self.norms = K1 * (1 - B + B * lengths / max(1.0, float(lengths.mean()))) if len(lengths) else lengths

    @classmethod
    def build(cls, texts: Iterable[str]) -> "Bm25":
        vocabulary: dict[str, int] = {}
        term_of, doc_of, count_of, lengths = array("i"), array("i"), array("i"), array("i")
        for doc, text in enumerate(texts):
            found = Counter(terms(text))
            lengths.append(sum(found.values()))
            for term, count in found.items():
                term_of.append(vocabulary.setdefault(term, len(vocabulary)))
                doc_of.append(doc)
                count_of.append(count)
        term_ids = np.array(term_of, dtype=np.int32)
        order = np.argsort(term_ids, kind="stable")  # by term, then by text
        starts = np.zeros(len(vocabulary) + 1, dtype=np.int64)
        np.cumsum(np.bincount(term_ids, minlength=len(vocabulary)), out=starts[1:])
        docs, counts = (np.array(column, dtype=np.int32)[order] for column in (doc_of, count_of))
        return cls(vocabulary, starts, docs, counts, np.array(lengths, dtype=np.int32))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """(number, score) of the k best texts that share a term with the query, best first; of equal
        scores the lower number first. A term that the query repeats counts once."""
        scores = np.zeros(len(self.lengths))
        for term in list(dict.fromkeys(terms(query)))[:MAX_QUERY_TERMS]:
            number = self.vocabulary.get(term)
            if number is not None:
                first, last = self.starts[number], self.starts[number + 1]
                docs, counts = self.docs[first:last], self.counts[first:last]
                idf = np.log1p((len(scores) - len(docs) + 0.5) / (len(docs) + 0.5))
                scores[docs] += idf * counts * (K1 + 1) / (counts + self.norms[docs])
        found = np.flatnonzero(scores)
        if len(found) > k > 0:
            least = np.partition(scores[found], len(found) - k)[len(found) - k]
            found = found[scores[found] >= least]
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [(int(doc), float(scores[doc])) for doc in best]

    def save(self, folder: Path, meta: dict, **more: np.ndarray) -> None:
        """Write the index, `meta` and more arrays into a folder, all or nothing."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        try:
            for name, values in ({name: getattr(self, name) for name in ARRAYS} | more).items():
                np.save(temporary / f"{name}.npy", values, allow_pickle=False)
            (temporary / "terms.txt").write_text("\n".join(self.vocabulary), encoding="utf-8")
            text = json.dumps({**meta, "version": VERSION, "texts": len(self.lengths)})
            (temporary / "meta.json").write_text(text, encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def open(cls, folder: Path) -> "Bm25":
        """The index of a folder that `save` wrote, its arrays mapped from disk."""
        words = (folder / "terms.txt").read_text(encoding="utf-8").split("\n")
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ARRAYS]
        return cls({word: number for number, word in enumerate(words)}, *arrays)


@dataclass
class Attached:
    """The passages of one question as a corpus; the index is made by the first search."""

    passages: list[Passage] = field(repr=False)

    @cached_property
    def index(self) -> Bm25:
        return Bm25.build(f"{passage.title}\n{passage.text}" for passage in self.passages)

    def search(self, query: str, k: int) -> list[Passage]:
        """The k best passages, best first; fewer where fewer share a term with the query."""
        return [self.passages[doc] for doc, _ in self.index.search(query, k)]
