"""What the quickstart leaves behind: a table on the screen, a picture of the curves, and a JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

LAST = 10  # steps whose mean is called the final loss
EQUAL = 1e-5  # relative difference up to which two losses are called equal


@dataclass(frozen=True)
class Result:
    """One run: the loss of every step, the median time of a step, and the tokens of all ranks per second."""

    name: str
    losses: list[float]
    ms_per_iteration: float
    tokens_per_second: float
    settings: dict

    @property
    def final_loss(self) -> float:
        last = self.losses[-LAST:]
        return sum(last) / len(last)


def write_report(folder: Path, results: list[Result], compared_with: dict[str, str | None], about: dict) -> None:
    """Print the table, and write results.json and curves.png into `folder`.

    compared_with: run -> the run whose losses it must equal (None: it is compared with nothing).
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {result.name: result for result in results}
    comparisons = {
        name: {"with": stock, **_compare(by_name[name].losses, by_name[stock].losses)}
        for name, stock in compared_with.items()
        if stock
    }
    print(_table(results, comparisons), flush=True)
    record = {"about": about, "runs": [], "comparisons": comparisons}
    for result in results:
        record["runs"].append({**asdict(result), "final_loss": result.final_loss})
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    _draw(folder / "curves.png", results, compared_with)
    print(f"\nwritten: {folder / 'curves.png'}, {folder / 'results.json'}", flush=True)


def _compare(losses: list[float], expected: list[float]) -> dict[str, float]:
    """How many steps, from the first, have equal losses, and the largest relative difference in those steps."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    equal = next((step for step, difference in enumerate(differences) if difference > EQUAL), len(differences))
    return {"equal_steps": equal, "largest_relative_difference": max(differences[:equal], default=0.0)}


def _table(results: list[Result], comparisons: dict[str, dict]) -> str:
    title = f"losses equal (within {EQUAL:.0e}, relative)"
    lines = [f"\n{'run':<28}{'final loss':>11}{'ms/iteration':>14}{'tokens/s':>11}   {title}"]
    parted = False
    for result in results:
        row = f"{result.name:<28}{result.final_loss:>11.4f}{result.ms_per_iteration:>14.1f}"
        row += f"{result.tokens_per_second:>11,.0f}"
        if result.name in comparisons:
            compared, steps = comparisons[result.name], len(result.losses)
            parted = parted or compared["equal_steps"] < steps
            row += f"   steps 1 to {compared['equal_steps']} of {steps}, to {compared['with']}"
        lines.append(row)
    if parted:
        lines.append(
            "Where losses part after many steps, a rounding difference in the last bit (the experts multiply other\n"
            "numbers of rows) has turned a near-tie of the router; from there it is another run, equally good."
        )
    return "\n".join(lines)


def _draw(path: Path, results: list[Result], compared_with: dict[str, str | None]) -> None:
    """One panel of losses for each stock run: its curve wide and pale, those compared with it thin and dark on top of
    it, so that equal ones can be told apart. On the right the speeds."""
    stock = [result for result in results if compared_with[result.name] is None]
    figure, axes = plt.subplots(1, len(stock) + 1, figsize=(5 * len(stock) + 5, 4.5), layout="constrained")
    colors = {result.name: f"C{number}" for number, result in enumerate(results)}
    for panel, reference in zip(axes, stock, strict=False):
        steps = range(1, len(reference.losses) + 1)
        panel.plot(steps, reference.losses, color=colors[reference.name], linewidth=6, alpha=0.3, label=reference.name)
        ours = [result for result in results if compared_with[result.name] == reference.name]
        for result, style in zip(ours, ("-", "--"), strict=False):
            panel.plot(steps, result.losses, style, color=colors[result.name], linewidth=1.2, label=result.name)
        panel.set(xlabel="step", ylabel="loss (nats per byte)", title="Training loss, mean of the two processes")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend()
        panel.grid(alpha=0.3)
    names = [result.name for result in results]
    speeds = axes[-1]
    bars = speeds.barh(names, [result.ms_per_iteration for result in results], color=[colors[name] for name in names])
    speeds.bar_label(bars, fmt="%.0f ms", padding=3)
    speeds.margins(x=0.2)
    speeds.invert_yaxis()
    speeds.set(xlabel="ms per iteration (median)", title="Speed on this machine's CPU")
    figure.savefig(path, dpi=100)
    plt.close(figure)
