"""What is told of a tensor's elements: statistics, histograms, and how two tensors differ. In bounded memory.

pieces      a tensor in pieces that fit into memory, as arrays that numpy counts with
summary     minimum, mean, maximum; what is no number; a histogram
comparing   how many elements of two tensors differ, and by how much
"""

from __future__ import annotations

from memstore.figures.comparing import Unequal, compare
from memstore.figures.pieces import numbers, pieces
from memstore.figures.summary import Bin, Summary, histogram, summarize

__all__ = ["Bin", "Summary", "Unequal", "compare", "histogram", "numbers", "pieces", "summarize"]
