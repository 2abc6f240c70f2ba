"""Put results of several benchmarks together: python launch/benchmark_report.py FILE.json... --out FILE."""

from __future__ import annotations

from pathlib import Path

from lezo_ds import command_line
from lezo_ds.tools.benchmark.report import draw, write_report
from lezo_ds.tools.benchmark.results import read_results


def main() -> None:
    """Parse, build, run."""
    parser = command_line.parser(__doc__ or "")
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE.json", help="of launch/benchmark.py")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="write FILE.md and pictures")
    parser.add_argument("--processor-time", action="store_true", help="growth and speedup by it")
    arguments = parser.parse_args()
    results = [read_results(path) for path in arguments.results]
    write_report(results, arguments.out, processor=arguments.processor_time)
    draw(results, arguments.out, processor=arguments.processor_time)


if __name__ == "__main__":
    command_line.run(main)
