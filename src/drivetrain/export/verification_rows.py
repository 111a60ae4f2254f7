"""The figures of a verification as rows of a table: for the terminal and for the card."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.export.verification import Verdict


def rows(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    """Yields (figure, of the run, of the export). Figures of both together stand in the last column."""
    found, bound = verdict.difference, verdict.bound
    yield "largest difference of scores", "", f"{found.maximum:.3g}"
    yield "mean difference of scores", "", f"{found.mean:.3g}"
    yield "difference, of the scores' spread", "", f"{found.relative:.3g} (bound {bound.relative:g})"
    if found.kl_mean is not None:
        yield "KL divergence, mean", "", f"{found.kl_mean:.3g} nats (bound {bound.kl:g})"
        yield "KL divergence, largest", "", f"{found.kl_max:.3g} nats"
        yield "same likeliest answer", "", f"{found.agreement:.2%} of {found.rows:,}"
    compared = verdict.answers
    if total := compared.equal + compared.tied + compared.other:
        tied = f", {compared.tied} part where two tokens were as likely" if compared.tied else ""
        yield "same greedy answers", "", f"{compared.equal} of {total}{tied}"
    if verdict.merge is not None:
        yield "merging the adapters, of the spread", "", f"{verdict.merge.relative:.3g}"
    for name, value in verdict.before.items():
        yield name, f"{value:.5g}", f"{verdict.after.get(name, float('nan')):.5g}"
    yield "seconds for the samples", f"{verdict.seconds[0]:.3g}", f"{verdict.seconds[1]:.3g}"
