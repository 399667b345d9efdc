"""`ratoon verify`: are a run's stored responses what its keys and weights give?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ratoon.loop.certificate import Certificate
    from ratoon.observe.run_folder import RunFolder


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of an `rl` run, such as runs/quickstart.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Only the responses of this step. Default: all.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many responses of each file.")
    ] = None,
) -> None:
    """Select every stored token again from stored weights; writes certificate.json.

    Exit code 0: verified; 1: not verified; 2: nothing can be checked.
    """
    from ratoon.cli.running import watching
    from ratoon.observe.run_folder import RunFolder

    folder = RunFolder(run)
    with watching(None) as observer:
        from ratoon.loop.certificate import verify_run, write_certificate
        from ratoon.loop.model_card import certify_card

        certificate = verify_run(folder, observer, step=step, limit=limit)
    write_certificate(folder, certificate)
    certify_card(folder, certificate)
    for line in _lines(folder, certificate):
        Console().print(line, soft_wrap=True, highlight=False, markup=False)
    if not certificate.holds:
        raise typer.Exit(1)


def _lines(folder: RunFolder, certificate: Certificate) -> list[str]:
    from ratoon.loop.certificate import SIGNIFICANCE, told

    lines = []
    for item in certificate.checked:
        check, tolerance = item.check, item.tolerance
        after = f"after step {item.weights.version}" if item.weights.version else "before step 1"
        same = f"{check.tokens - check.flips:,} of {check.tokens:,} tokens the same"
        bits = f"log-probabilities equal to the bit: {check.equal_bits:,}"
        if tolerance is not None:
            bits += (
                f", others differ by at most {check.largest_difference:.1e} "
                f"(allowed {tolerance.logprob:.1e})"
            )
        lines.append(
            f"{check.split} {check.step}: {check.responses:,} responses, {same}, {bits}; weights "
            f"{after}, {item.weights.path}"
        )
    lines += [f"not checked: {words}" for words in told(certificate.unchecked)]
    statistic, p_value = certificate.uniformity
    lines.append(
        f"uniformity of {len(certificate.uniforms):,} tokens: Kolmogorov-Smirnov {statistic:.4f}, "
        f"p = {p_value:.3g}" + (f", below {SIGNIFICANCE:g}" if p_value < SIGNIFICANCE else "")
    )
    if certificate.first_wrong is not None:
        check, wrong = certificate.first_wrong
        position, what, expected, stored = wrong.broken
        where = "" if position is None else f", position {position}"
        lines.append(
            f"wrong: {check.split} {check.step}, response {wrong.line}{where}: {what} should be "
            f"{expected}, but {stored} is stored"
        )
    lines.append(f"certificate: {folder.certificate}")
    lines.append("VERIFIED" if certificate.holds else "NOT VERIFIED")
    return lines
