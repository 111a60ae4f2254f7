"""The standard error of a win rate: a share of prompts, where a tie counts half.

A win rate is (1 + p - q) / 2, with p the share of wins and q that of losses: a difference of two shares of the same
prompts. The deviation over the prompts is 0 where all are ties, or all are wins, and so claims to know from a few
prompts what any other prompt would bring. Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of
binomial proportions based on paired data", Journal of Educational and Behavioral Statistics 37:479, add one win and one
loss to what was counted, as Agresti and Coull 1998, "Approximate is better than 'exact' for interval estimation of
binomial proportions", The American Statistician 52:119, add successes and failures to a single share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Adjusted(NamedTuple):
    """middle: of an interval, which lies nearer to 1/2 than the win rate itself. error: its standard error."""

    middle: float
    error: float


def adjusted_win_rate(wins: Sequence[float]) -> Adjusted:
    """Returns the middle and the standard error of a win rate after one win and one loss were added.

    wins: for each prompt 1 for a win, 0 for a loss, 0.5 for a tie. The error is the deviation of these and the two
    added ones over the square root of their number; of n ties it is 1 / (sqrt(2) (n + 2)).
    """
    number = len(wins) + 2
    middle = (math.fsum(wins) + 1) / number
    squares = math.fsum((win - middle) ** 2 for win in (*wins, 1.0, 0.0))
    return Adjusted(middle, math.sqrt(squares) / number)
