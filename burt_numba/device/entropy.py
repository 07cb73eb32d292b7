"""The temperature search: the largest temperature at which a softmax keeps within an entropy bound.

For a row z with maximum m the kernels hold ``gap = (m - z) / ln 2``, so that with beta = 1/T an element weighs
``2**(-beta * gap)``. One evaluation at beta sums three numbers over the row,

    total = sum w        first = sum t w        second = sum t**2 w        with t = beta * gap, w = 2**-t,

which give the entropy ``H = ln(total) + ln2 * first / total`` and its slope ``dH/d(ln beta) = -Var(t)``. The functions
here are the scalar part, the same for every thread of a row; docs/constrained_softmax.md derives them.
"""

from __future__ import annotations

import numpy as np

from burt_numba.backend import cuda
from burt_numba.device.numeric import (
    FLOAT32_MAX,
    LN_2,
    LOG2_E,
    exp2,
    log,
    log2,
    maximum,
    minimum,
    reciprocal,
    square_root,
)
from burt_numba.device.warp import FULL_MASK, any_lane

_LN_2_SQUARED = np.float32(LN_2 * LN_2)
_LN_2_CUBED = np.float32(LN_2 * LN_2 * LN_2)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_THREE = np.float32(3.0)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)

GAP_RANGE = np.float32(160.0)
"""A weight 2**-160 is 0 in float32: at the lowest beta, larger gaps are the same as this one."""

MAX_BETA_RATIO = np.float32(1e35)
"""Highest beta over the lowest; keeps beta * gap finite. T = 1 / MAX_BETA_RATIO resolves no float32 logits of use."""

UNREACHED_TOLERANCE = np.float32(1e-6)
"""Nats over the bound that rounding may leave; more than this at the lowest temperature is recorded."""

_BAND_RELATIVE = np.float32(1e-4)
_BAND_ABSOLUTE = np.float32(1e-6)
# Where the search aims and what it accepts, as parts of the band below the bound: rounding of H (a few 1e-7) must not
# push an accepted row out of the band at either end.
_AIM = np.float32(0.35)
_ACCEPT = np.float32(0.7)

_LARGEST_STEP = np.float32(16.0)
_NEGLIGIBLE_ENTROPY = np.float32(1e-30)
_LARGEST_EXPONENT = np.float32(120.0)
_SAFE_STEPS = 8


@cuda.jit(device=True)
def first_beta(temperature_min, temperature_max):
    """1/T0 with T0 = 1 clipped into the allowed temperatures."""
    return _ONE / minimum(maximum(_ONE, temperature_min), temperature_max)


@cuda.jit(device=True)
def last_beta(temperature_min, beta):
    """The highest beta the search may use: 1/temperature_min, as far as float32 carries it."""
    limit = minimum(beta * MAX_BETA_RATIO, FLOAT32_MAX)
    return limit if temperature_min * limit <= _ONE else _ONE / temperature_min


@cuda.jit(device=True)
def temperature_of(beta, temperature_min, temperature_max):
    """The temperature of a beta; at the ends of the range, what the caller gave and not the reciprocal of its own."""
    lowest_beta = first_beta(temperature_min, temperature_max)
    if beta <= lowest_beta:
        return minimum(maximum(_ONE, temperature_min), temperature_max)
    if beta >= _ONE / temperature_min:
        return temperature_min
    return _ONE / beta


@cuda.jit(device=True)
def gap_of(row_max, value, gap_limit):
    """(row_max - value) / ln 2, at most ``gap_limit``; a value of -inf gets the limit and so no weight."""
    return minimum((row_max - value) * LOG2_E, gap_limit)


@cuda.jit(device=True)
def entropy_of(total, first):
    """Entropy in nats; 0 for a row with nothing finite in it."""
    if total > _ZERO:
        return maximum(log(total) + LN_2 * (first / total), _ZERO)
    return _ZERO


@cuda.jit(device=True)
def variance_of(total, first, second):
    """Var(t) in nats squared: minus the slope of H in ln beta."""
    scale = reciprocal(total)
    mean = first * scale
    return maximum((second * scale - mean * mean) * _LN_2_SQUARED, _ZERO)


@cuda.jit(device=True)
def accepted_range(bound):
    """(lowest entropy to accept, entropy to aim at) for an active bound."""
    band = maximum(_BAND_RELATIVE * bound, _BAND_ABSOLUTE)
    # A bound of 0 is met by any H the tolerance allows, and has no logarithm to aim at.
    aim = maximum(bound - _AIM * band, _AIM * UNREACHED_TOLERANCE)
    return bound - _ACCEPT * band, aim


@cuda.jit(device=True)
def accepted_limits(bound):
    """(highest entropy that is within the bound, lowest one to accept, entropy to aim at)."""
    # A bound of next to nothing is met within the tolerance, where there still is an entropy to search by.
    lowest_accepted, aim = accepted_range(bound)
    return maximum(bound, _ACCEPT * UNREACHED_TOLERANCE), lowest_accepted, aim


@cuda.jit(device=True)
def bend_of(total, first, second, third, variance, entropy, aim):
    """By how much a Newton step on ln H against beta is too long: Halley's rule, from the third central moment of t.

    ``third`` is the sum of t**3 w; docs/biencoder_attention.md derives it. Far from the aim the rule is of no use: what
    comes out is kept between a half and two.
    """
    scale = reciprocal(total)
    mean = first * scale
    skew = (third - _THREE * mean * second) * scale + _TWO * mean * mean * mean
    skew *= _LN_2_CUBED
    distance = (log2(entropy) - log2(aim)) * _HALF * LN_2
    curvature = (skew - variance) * entropy * reciprocal(variance * variance)
    bend = _ONE + distance * (_ONE - curvature)
    return minimum(maximum(bend, _HALF), _TWO)


@cuda.jit(device=True)
def next_beta(step, beta, entropy, variance, bend, low, high, bracketed, aim):
    """The next beta to try, between ``low`` (H over the bound there) and ``high``.

    ln H is nearly linear in beta where the bound is met (the runner-up's weight falls exponentially), and better
    followed in ln beta where it is not: a Newton step in those coordinates lands within a few per cent at once. Until
    the bracket is closed (``bracketed``), a step is limited, but never to less than what brings Var(t) to 1.
    ``bend``: of ``bend_of``, by which a step in beta is divided, and which lets one be taken below twice the aim; 0 for
    an evaluation without the third moment.
    """
    if entropy > _NEGLIGIBLE_ENTROPY and variance > _NEGLIGIBLE_ENTROPY:
        change = (log2(entropy) - log2(aim)) * entropy * reciprocal(variance)
        # Above the aim the change is positive, and where H is nearly flat larger than any beta.
        step_up = exp2(minimum(change, _LARGEST_EXPONENT))
        in_beta = entropy < aim or (bend != _ZERO and entropy < _TWO * aim)
        guess = beta * (_ONE + LN_2 * change / (bend if bend != _ZERO else _ONE) if in_beta else step_up)
    else:
        guess = FLOAT32_MAX if not bracketed else _ZERO
    if not bracketed:
        if variance > _NEGLIGIBLE_ENTROPY:
            guess = minimum(guess, beta * maximum(_LARGEST_STEP, reciprocal(square_root(variance))))
        return minimum(guess, high)
    if not (low < guess < high) or (step >= _SAFE_STEPS and step & 1 == 1):
        guess = square_root(low) * square_root(high)
    return guess


def entropy_search(evaluate):
    """A device function that finds a row's temperature; every thread of the row calls it with the same scalars.

    ``evaluate(data, beta, phase)`` gives the three sums of the row at beta to every thread of it; ``data`` is a tuple
    of whatever it needs, and ``phase`` alternates as the block reductions want it. The result is (beta, total at beta,
    entropy at beta, next phase), from the feasible side wherever an evaluation was feasible.
    """

    @cuda.jit(device=True)
    def search(data, bound, lowest_beta, highest_beta, max_iterations, phase):
        beta = lowest_beta
        total, first, second = evaluate(data, beta, phase)
        phase ^= 1
        entropy = entropy_of(total, first)
        # A bound of next to nothing is met within the tolerance, where there still is an entropy to search by.
        limit = maximum(bound, _ACCEPT * UNREACHED_TOLERANCE)
        if entropy > limit:
            lowest_accepted, aim = accepted_range(bound)
            low = beta
            high = highest_beta
            bracketed = False
            best_beta, best_total, best_entropy = beta, total, entropy
            step = 0
            searching = True
            while searching:
                if step == max_iterations - 1 and not bracketed:
                    beta = highest_beta
                else:
                    variance = variance_of(total, first, second)
                    beta = next_beta(step, beta, entropy, variance, _ZERO, low, high, bracketed, aim)
                total, first, second = evaluate(data, beta, phase)
                phase ^= 1
                entropy = entropy_of(total, first)
                step += 1
                if entropy <= limit:
                    # Each feasible beta lies below the one before it, so that the latest is the best.
                    best_beta, best_total, best_entropy = beta, total, entropy
                    high = beta
                    bracketed = True
                    searching = entropy < lowest_accepted
                else:
                    low = beta
                    if beta >= highest_beta:
                        best_beta, best_total, best_entropy = beta, total, entropy
                        searching = False
                if step >= max_iterations:
                    searching = False
            return best_beta, best_total, best_entropy, phase
        return beta, total, entropy, phase

    return search


def lanes_search(evaluate):
    """As ``entropy_search``, where each lane of a warp looks after a row of its own and all evaluate together.

    ``evaluate(data, beta)`` gives a lane the three sums of its row at its beta. It may be long: it stands here once.
    """

    @cuda.jit(device=True)
    def search(data, bound, lowest_beta, highest_beta, max_iterations):
        limit, lowest_accepted, aim = accepted_limits(bound)
        beta, low, high = lowest_beta, lowest_beta, highest_beta
        best_beta, best_total, best_entropy = lowest_beta, _ZERO, _ZERO
        bracketed = False
        # Of the evaluations after the first, as there.
        step = np.int32(-1)
        searching = True
        while any_lane(searching, FULL_MASK):
            total, first, second = evaluate(data, beta)
            if searching:
                step = np.int32(step + 1)
                entropy = entropy_of(total, first)
                is_within = entropy <= limit
                if is_within or step == 0 or beta >= highest_beta:
                    best_beta, best_total, best_entropy = beta, total, entropy
                if is_within:
                    high = beta
                    bracketed = True
                    searching = step > 0 and entropy < lowest_accepted
                else:
                    low = beta
                    searching = step == 0 or beta < highest_beta
                searching = searching and step < max_iterations
                if step == max_iterations - 1 and not bracketed:
                    beta = highest_beta
                elif searching:
                    variance = variance_of(total, first, second)
                    beta = next_beta(step, beta, entropy, variance, _ZERO, low, high, bracketed, aim)
        return best_beta, best_total, best_entropy

    return search


_STEPS_OF_TWO = 4
_SAFE_SHARE = np.float32(1 - 2**-8)
NEAR_SHARE = np.float32(0.16)
NEAR_ROUGH_SHARE = np.float32(0.08)
"""Of the aim, after an exact start or a rough one. Errors of scores take that far from the aim most where two contexts
nearly tie, and there a step's own error is largest too."""
_NEAR_SQUARE = np.float32(0.06**2)


@cuda.jit(device=True)
def beta_of_two(gap, bound, lowest_beta, highest_beta):
    """A beta at which the greatest two elements of a row alone prove its entropy to be over the bound, or the lowest.

    ``gap``: of the second. With w = 2**-(beta gap) and L = -ln w the entropy is at least (1 + L) / (1 + 1 / w), so that
    L = ln((1 + L) / bound - 1) can be stepped to from below (docs/biencoder_attention.md).
    """
    share = reciprocal(maximum(bound, UNREACHED_TOLERANCE))
    nats = _ZERO
    for _step in range(_STEPS_OF_TWO):
        nats = maximum(LN_2 * log2(maximum((_ONE + nats) * share - _ONE, _ONE)), _ZERO)
    beta = nats * _SAFE_SHARE * LOG2_E / gap if gap > _ZERO else FLOAT32_MAX
    return minimum(maximum(beta, lowest_beta), highest_beta) if nats > _ZERO else lowest_beta


@cuda.jit(device=True)
def is_near(entropy, aim, share):
    """Whether a step of ``next_beta`` with a bend is likely to end within the band: nearer than this share of the aim.

    Its error is of third order in ln H, by a factor that grows with H: the bounds are measured (docs/performance.md).
    """
    distance = abs(entropy - aim)
    return distance < share * aim and distance * distance < _NEAR_SQUARE * aim


_COLUMNS_A_PART = 64
"""Columns a thread sums in float32 before it adds to float64, so that rounding does not grow with the row."""

SUMMED_TOGETHER = 4
"""Weights added to each other before they join a sum that may hold the peak's 1, beside which they round off."""


def column_sums(read_gap, reduce_sum3):
    """An ``evaluate`` for ``entropy_search`` that walks a row column by column, for rows that registers cannot hold.

    ``data`` is (source, first column, end, step, scratch, exchange): the thread takes the columns from its first by
    ``step``, and ``read_gap(source, column)`` gives their gaps.
    """

    @cuda.jit(device=True)
    def evaluate(data, beta, phase):
        source, column, end, step, scratch, exchange = data
        total = np.float64(0.0)
        first = np.float64(0.0)
        second = np.float64(0.0)
        while column < end:
            part_end = min(column + _COLUMNS_A_PART * step, end)
            part_total = _ZERO
            part_first = _ZERO
            part_second = _ZERO
            peaks = _ZERO
            while column < part_end:
                gap = read_gap(source, column)
                t = beta * gap
                weight = exp2(-t)
                weighted = t * weight
                # Beside a peak's 1, many small weights would round off one by one.
                if gap > _ZERO:
                    part_total += weight
                else:
                    peaks += weight
                part_first += weighted
                part_second += weighted * t
                column += step
            total += np.float64(part_total) + np.float64(peaks)
            first += np.float64(part_first)
            second += np.float64(part_second)
        return reduce_sum3(np.float32(total), np.float32(first), np.float32(second), scratch, exchange, phase)

    return evaluate
