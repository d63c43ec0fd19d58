"""The planner's arithmetic: limits, monotony, and one rank that talks to nobody."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.errors import PlatformError
from unisono.plan.calibration import TYPICAL, fit_link
from unisono.plan.cluster import (
    Cluster,
    Link,
    all_gather,
    all_reduce,
    all_reduce_between,
    all_reduce_ring,
    all_reduce_tree,
    broadcast,
    contention,
)
from unisono.plan.prediction import Impossible, Prediction, remaining, waiting
from unisono.plan.quantities import read_rate, read_time, write_bytes, write_rate, write_time
from unisono.plan.ways import (
    bayes,
    compare,
    daso,
    data_parallel,
    graph,
    grid_of,
    sharded,
    spatial,
    tensor,
)
from unisono.plan.workload import GraphInput, Layer, Pace, SentBucket, Workload, fit_pace

LINK = Link(name="net", latency_s=2e-6, bytes_per_s=1e10)
SLOW = Link(name="slow", latency_s=1e-3, bytes_per_s=1e7)
NODE = Link(name="shm", latency_s=5e-5, bytes_per_s=5e9, overlap=0.0, direct=True, on_cores=True)
CLUSTER = Cluster(nodes=16, ranks_per_node=4, inner=NODE, outer=LINK)
CONV = Layer(
    name="conv", kind="Conv2d", parameter_bytes=4000, share=0.8,
    input_shape=(8, 32, 32), output_shape=(8, 32, 32), reach=(2, 2),
)  # fmt: skip
LINEAR = Layer(
    name="head", kind="Linear", parameter_bytes=4_000_000, share=0.2,
    input_shape=(8192,), output_shape=(128,),
)  # fmt: skip


RING = GraphInput(
    edge_index=torch.stack([torch.arange(1000), torch.arange(1000).roll(1)]),
    nodes=1000, row_bytes=256, exchanges=3,
)  # fmt: skip
WORK = Workload(
    name="small",
    forward=Pace(fixed_s=1e-3, sample_s=1e-3),
    backward=Pace(fixed_s=2e-3, sample_s=2e-3),
    optimizer_s=5e-4,
    parameter_bytes=4_004_000,
    state_bytes=4_004_000,
    activation_bytes=1e5,
    buckets=[
        SentBucket(nbytes=4_000_000, ready=0.2, needed=0.8),
        SentBucket(nbytes=4_000, ready=1.0, needed=0.0),
    ],
    layers=[CONV, LINEAR],
    graph=RING,
)
BAYES = replace(WORK, is_bayesian=True, layers=(), graph=None)

CHEAP = settings(deadline=None, max_examples=40)
sizes = st.floats(1, 1e10)
counts = st.integers(1, 10_000)
links = st.builds(
    Link,
    name=st.just("any"),
    latency_s=st.floats(0, 1e-2),
    bytes_per_s=st.floats(1e6, 1e12),
    overlap=st.floats(0, 1),
    direct=st.booleans(),
    on_cores=st.booleans(),
)
SUMS = (all_reduce, all_reduce_ring, all_reduce_tree, all_gather, broadcast)


@pytest.mark.parametrize("collective", SUMS)
@CHEAP
@given(nbytes=sizes, ranks=counts, link=links)
def test_collectives_grow_with_bytes_and_ranks_and_cost_nothing_alone(
    collective, nbytes, ranks, link
):
    assert collective(nbytes, 1, link) == 0
    here = collective(nbytes, ranks, link)
    assert here <= collective(2 * nbytes, ranks, link)
    assert here <= collective(nbytes, 2 * ranks, link) * (1 + 1e-12)
    faster = replace(link, bytes_per_s=2 * link.bytes_per_s, latency_s=link.latency_s / 2)
    assert collective(nbytes, ranks, faster) <= here


def test_known_values_of_the_formulas():
    free = replace(LINK, latency_s=0.0)
    assert all_reduce_ring(1e10, 2, free) == pytest.approx(1.0)  # 2 * 1/2 * n / B
    assert all_reduce_ring(1e10, 10**6, free) == pytest.approx(2.0, rel=1e-5)  # the bandwidth limit
    assert all_reduce_ring(0, 4, LINK) == pytest.approx(6 * 2e-6)
    assert all_reduce_tree(0, 1024, LINK) == pytest.approx(20 * 2e-6)
    assert all_reduce_tree(8, 1024, LINK) < all_reduce_ring(8, 1024, LINK)
    # One rank a node: nothing to do inside, and nothing that a core must do.
    single = replace(CLUSTER, nodes=8, ranks_per_node=1)
    between = all_reduce_between(1e9, 8, LINK)
    assert between == min(all_reduce_ring(1e9, 8, LINK), all_reduce_tree(1e9, 8, LINK))
    assert single.all_reduce(1e9)[:2] == (between, between)
    # Four ranks a node: what shared memory does cannot be hidden, what the network does can.
    found = replace(single, ranks_per_node=4, outer=replace(SLOW, latency_s=0.0)).all_reduce(1e9)
    between = all_reduce_between(1e9, 8, replace(SLOW, latency_s=0.0))
    assert found.algorithm == "hierarchical"
    assert found.seconds == pytest.approx(2 * all_gather(1e9, 4, NODE) + between)
    assert found.free_s == pytest.approx(between)


@CHEAP
@given(nbytes=sizes, nodes=st.integers(1, 500), per_node=st.integers(1, 16))
def test_the_fastest_algorithm_is_taken(nbytes, nodes, per_node):
    cluster = replace(CLUSTER, nodes=nodes, ranks_per_node=per_node)
    seconds, free, _ = cluster.all_reduce(nbytes)
    assert 0 <= free <= seconds
    assert (seconds == 0) == (nodes * per_node == 1)
    if nodes > 1:
        formulas = (all_reduce_ring, all_reduce_tree)
        flat = [each(nbytes, cluster.ranks, cluster.network) for each in formulas]
        assert seconds <= min(flat)


@CHEAP
@given(ranks=st.integers(1, 64), cores=st.integers(1, 16))
def test_ranks_that_share_cores_take_turns(ranks, cores):
    assert contention({}, ranks, cores) == max(1, ranks / cores)
    assert contention({}, ranks, None) == 1
    measured = {2: 1.2, 4: 2.5}
    assert contention(measured, 2, cores) == 1.2
    assert contention(measured, ranks, 2) <= contention(measured, ranks + 1, 2)
    slow = NODE.among(ranks, cores)
    assert slow.bytes_per_s * max(1, ranks / cores) == pytest.approx(NODE.bytes_per_s)
    assert LINK.among(ranks, cores) is LINK  # a network card does its own work


@CHEAP
@given(
    durations=st.lists(st.floats(0, 10), min_size=1, max_size=6),
    overlap=st.floats(0, 1),
    backward=st.floats(0, 20),
)
def test_waiting_lies_between_nothing_and_all_messages(durations, overlap, backward):
    count = len(durations)
    ready = [backward * (i + 1) / count for i in range(count)]
    at_once = [0.0] * count
    late = waiting(ready, durations, at_once, backward, overlap)
    needed = [backward * (count - 1 - i) / count for i in range(count)]
    deferred = waiting(ready, durations, needed, backward, overlap)
    total = math.fsum(durations)
    assert -1e-9 <= deferred <= late + 1e-9 <= total + 2e-9
    assert waiting(ready, durations, at_once, backward, 0.0) == pytest.approx(total)
    assert late >= durations[-1] - 1e-9  # the last bucket is full when backward ends


def test_remaining_is_what_overlap_leaves():
    assert remaining(10, 2, 0.5) == 6
    assert waiting([], [], [], 1.0, 1.0) == 0


def every_way(workload, cluster, batch=8.0):
    found = compare(workload, cluster, batch)
    return {each.way: each for each in found if isinstance(each, Prediction)}


def test_one_rank_communicates_nothing_in_any_way():
    alone = replace(CLUSTER, nodes=1, ranks_per_node=1)
    for workload, expected in ((WORK, 7), (BAYES, 1)):
        ways_found = every_way(workload, alone)
        assert len(ways_found) == expected
        for found in ways_found.values():
            assert found.communication_s == found.waiting_s == 0, found.way
            assert found.step_s == pytest.approx(workload.compute(8))
            assert found.efficiency == pytest.approx(1)


@CHEAP
@given(nodes=st.integers(1, 300), batch=st.floats(0.01, 100), update=st.floats(0, 1))
def test_no_way_gets_faster_with_slower_ranks(nodes, batch, update):
    cluster = replace(CLUSTER, nodes=nodes, outer=SLOW)
    workload = replace(WORK, optimizer_s=update)
    slower = every_way(workload, replace(cluster, rank_speed=0.5), batch)
    for way, found in every_way(workload, cluster, batch).items():
        assert slower[way].step_s >= found.step_s * (1 - 1e-12), way


@CHEAP
@given(nodes=st.integers(1, 300), batch=st.floats(1, 1000))
def test_every_way_gets_slower_with_slower_links_and_is_never_faster_than_computing(nodes, batch):
    cluster = replace(CLUSTER, nodes=nodes)
    slower = replace(cluster, outer=SLOW)
    for way, found in every_way(WORK, cluster, batch).items():
        worse = every_way(WORK, slower, batch)[way]
        assert worse.step_s >= found.step_s * (1 - 1e-12), way
        assert found.step_s >= found.compute_s
        assert 0 <= found.communication_share < 1
        assert found.waiting_s <= found.communication_s * (1 + 1e-9) + 1e-12
        assert found.memory_bytes > 0
        assert found.samples == batch * cluster.ranks


@CHEAP
@given(batch=st.floats(1, 500), more=st.floats(1, 500))
def test_larger_batches_take_longer_and_wait_for_a_smaller_share(batch, more):
    for way, found in every_way(WORK, CLUSTER, batch).items():
        larger = every_way(WORK, CLUSTER, batch + more)[way]
        assert larger.step_s >= found.step_s
        assert larger.memory_bytes >= found.memory_bytes
        if way.startswith("data parallel"):
            assert larger.communication_share <= found.communication_share + 1e-9


def test_the_ways_differ_as_they_should_over_a_slow_link():
    slow = replace(CLUSTER, outer=SLOW)
    found = every_way(WORK, slow)
    blocking = found["data parallel, blocking"]
    assert found["data parallel, non-blocking"].step_s <= blocking.step_s
    assert found["DASO"].step_s < 0.5 * blocking.step_s
    assert found["sharded (FSDP2)"].step_s > blocking.step_s
    assert found["sharded (FSDP2)"].memory_bytes < blocking.memory_bytes
    assert found["DASO"].memory_bytes > blocking.memory_bytes


def test_oversubscribed_ranks_are_predicted_slower():
    here = Cluster(nodes=1, ranks_per_node=4, inner=NODE, outer=NODE, cores_per_node=2)
    own = replace(here, cores_per_node=4)
    two, four = (data_parallel(WORK, cluster, 8) for cluster in (here, own))
    assert isinstance(two, Prediction)
    assert isinstance(four, Prediction)
    assert two.compute_s == pytest.approx(2 * four.compute_s)
    assert two.communication_s > 1.5 * four.communication_s
    measured = replace(here, slowdown={2: 1.1, 4: 2.4})
    assert measured.compute(1.0) == 2.4
    assert replace(measured, ranks_per_node=3).compute(1.0) == pytest.approx(1.75)


def test_impossible_ways_say_why():
    bare = replace(WORK, layers=(), graph=None)
    reasons = {e.way: e.reason for e in compare(bare, CLUSTER, 8) if isinstance(e, Impossible)}
    assert "no spatial dims" in reasons["spatial (halos)"]
    assert "no Linear" in reasons["tensor (features)"]
    assert "no graph" in reasons["graph (halos)"]
    assert "unisono.bayes" in reasons["Bayesian"]
    wide = tensor(WORK, replace(CLUSTER, nodes=64), 8, team=256)
    assert isinstance(wide, Impossible)
    assert "256 ranks share the features of 8192 to 128" in wide.reason
    assert isinstance(graph(WORK, replace(CLUSTER, nodes=1000), 8, team=501), Impossible)
    many = spatial(WORK, replace(CLUSTER, ranks_per_node=2048), 8)
    assert isinstance(many, Impossible)
    assert "32 points for 64 ranks" in many.reason
    for way in (data_parallel, daso, sharded):
        assert isinstance(way(BAYES, CLUSTER, 8), Impossible)
    assert isinstance(bayes(WORK, CLUSTER, 8), Impossible)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: replace(CLUSTER, nodes=0),
        lambda: replace(CLUSTER, rank_speed=0.0),
        lambda: replace(CLUSTER, cores_per_node=0),
        lambda: replace(LINK, bytes_per_s=0.0),
        lambda: replace(LINK, bytes_per_s=float("nan")),
        lambda: replace(LINK, latency_s=-1e-6),
        lambda: replace(LINK, overlap=1.5),
        lambda: compare(WORK, CLUSTER, 0),
        lambda: compare(WORK, CLUSTER, -8),
        lambda: compare(WORK, CLUSTER, float("nan")),
        lambda: compare(WORK, CLUSTER, 8, team=-1),
        lambda: compare(WORK, CLUSTER, 8, team=0),
    ],
)
def test_a_machine_or_a_batch_that_cannot_be_is_refused(ask):
    with pytest.raises(PlatformError, match="HINT"):
        ask()


def test_a_cut_graph_fetches_the_rows_at_its_cuts():
    free = replace(NODE, latency_s=0.0)
    cluster = Cluster(nodes=1, ranks_per_node=4, inner=free, outer=free)
    found = graph(replace(WORK, buckets=()), cluster, 1)
    assert isinstance(found, Prediction)
    assert RING.busiest(4) == (0.25, 1)
    assert found.communication_s == pytest.approx(6 * 256 * 4 / 5e9)  # 4 samples of the team


def test_halos_grow_with_the_surface_of_a_block():
    # 8 channels, 32 x 32 points on 2 x 2 ranks: a row and a column of 16 points, forward and back.
    free = replace(NODE, latency_s=0.0)
    cluster = Cluster(nodes=1, ranks_per_node=4, inner=free, outer=free)
    found = spatial(replace(WORK, buckets=()), cluster, 1)
    assert isinstance(found, Prediction)
    nbytes = 4 * 4 * 8 * (2 * 16 + 2 * 16)  # samples of the team, 4 bytes, channels, points
    assert found.communication_s == pytest.approx(nbytes / 5e9)
    assert (grid_of(8, (28, 28)), grid_of(12, (10, 10, 10))) == ((4, 2), (3, 2, 2))


@CHEAP
@given(fixed=st.floats(0, 1), each=st.floats(1e-6, 1))
def test_a_line_is_found_again(fixed, each):
    line = fit_pace([4, 8, 16], [fixed + n * each for n in (4, 8, 16)])
    assert line.fixed_s == pytest.approx(fixed, abs=1e-6)
    assert line.sample_s == pytest.approx(each, rel=1e-4)


def test_lines_through_nonsense_are_never_negative():
    for seconds in ([3.0, 2.0, 1.0], [0.1, 2.0, 40.0], [1.0, 1.0, 1.0]):
        line = fit_pace([1, 2, 4], seconds)
        assert min(line.fixed_s, line.sample_s) >= 0
    assert fit_pace([2, 2], [4.0, 4.0]).sample_s == pytest.approx(2.0)


@CHEAP
@given(latency=st.floats(1e-6, 1e-3), rate=st.floats(1e8, 1e11), factor=st.floats(1, 4))
def test_a_link_is_found_again_from_its_sums(latency, rate, factor):
    true = replace(TYPICAL.links["shm"], latency_s=latency, bytes_per_s=rate)
    slow = replace(true, bytes_per_s=rate / factor)
    nbytes = (4096, 1 << 18, 1 << 21, 1 << 23)
    measured = {
        2: [(n, all_reduce(n, 2, true)) for n in nbytes],
        4: [(n, all_reduce(n, 4, slow)) for n in nbytes],
    }
    found = fit_link(TYPICAL.links["shm"], measured)
    assert found.latency_s == pytest.approx(latency, rel=1e-3)
    assert found.bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert found.slowdown[4] == pytest.approx(factor, rel=1e-2)


def test_quantities_are_read_and_written_with_units():
    assert read_rate("10GB/s") == read_rate("80Gbit/s") == 1e10
    assert read_rate("1.5 mb/s") == 1.5e6
    assert (read_time("2us"), read_time("1.5 ms")) == (2e-6, 1.5e-3)
    assert write_time(12e-6) == "12 us"
    assert write_time(1234) == "1,234 s"
    assert write_bytes(999) == "999 B"
    assert write_rate(2.5e9) == "2.5 GB/s"
    for wrong in (
        "10", "fast", "10GB", "-1GB/s", "0GB/s", "1.2.3GB/s", "1e999GB/s",
        "10Gb/s",  # bits or bytes?
    ):  # fmt: skip
        with pytest.raises(PlatformError, match="HINT: write 10GB/s"):
            read_rate(wrong)
    for wrong in ("2", "2GB/s", "us", "1e999s"):
        with pytest.raises(PlatformError, match="HINT: write 2us"):
            read_time(wrong)
