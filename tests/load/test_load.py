"""Many samples at once beside training and heartbeats: none lost, none mixed up, no beat missed, no memory kept."""

import pytest
from traffic import Load

pytestmark = pytest.mark.timeout(600)
# Results must be kept until they are read, so their number is above that of the largest burst.
ARGUMENTS = ("--delay", "0.005", "--kept-results", "5000")
MIB = 1 << 20


def check(report, samples, growth):
    """`growth`: of the server's memory, in bytes."""
    assert report.wrong == []
    assert len(report.ids) == len(set(report.ids)) == samples
    assert report.heartbeats["failed"] == [] and max(report.heartbeats["seconds"]) < 10
    # float32 near 1 tells apart steps of 1e-7, and each step is at least 7e-6.
    assert report.training["weight"] == pytest.approx(report.training["expected"], abs=2e-6)
    assert report.training["steps"] >= 3
    assert report.after - report.before < growth


def test_hundreds_of_samples_beside_training(start_process, tmp_path):
    check(Load(start_process(*ARGUMENTS), tmp_path, 200).run(400, processes=2), 400, 32 * MIB)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_thousands_of_samples_from_eight_processes_beside_training(start_process, tmp_path):
    server = start_process(*ARGUMENTS)
    # Some KiB for each kept result, and for each connection and task of the burst, which the allocator holds: 80 MiB where
    # a quick machine has fewer of them open at once, 160 on a slow one.
    check(Load(server, tmp_path / "first", 800).run(4000, processes=8), 4000, 192 * MIB)
    # The second keeps a thousand results more, and the allocator's holes. What the third adds would be added for ever.
    check(Load(server, tmp_path / "second", 800).run(4000, processes=8), 4000, 32 * MIB)
    check(Load(server, tmp_path / "third", 800).run(4000, processes=8), 4000, 12 * MIB)


def test_a_refused_sample_is_sent_again_by_the_sdk(start_process, tmp_path):
    """A server that takes few samples at a time refuses most of these at first; all are answered."""
    server = start_process("--delay", "0.05", "--max-waiting-samples", "12")
    check(Load(server, tmp_path, 200).run(60, processes=1), 60, 32 * MIB)
