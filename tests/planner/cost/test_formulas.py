"""The formulas against figures worked out by hand."""

import math

import pytest

from pipeplan.cost import formulas
from pipeplan.plan import schedules


def test_ring_allreduce() -> None:
    # Four members of 100 bytes at 10 bytes/s: 2·3/4·100/10 s, and 2·3 messages of 0.5 s latency.
    assert formulas.ring_allreduce_time(4, 100, 10, 0.5) == pytest.approx(15 + 3)
    assert formulas.ring_allreduce_time(1, 100, 10, 0.5) == 0


@pytest.mark.parametrize(("overlap", "expected"), [(1.0, 5.0), (0.0, 8.0), (0.5, 6.5)])
def test_overlap_lies_between_the_larger_and_the_sum(overlap: float, expected: float) -> None:
    assert formulas.overlapped(5.0, 3.0, overlap) == pytest.approx(expected)
    assert formulas.overlapped(3.0, 5.0, overlap) == pytest.approx(expected)


def test_in_flight_depth() -> None:
    # A straight pipeline with free transfers: 1, 2, 3, 4 from the output.
    depths = [1]
    for _ in range(3):
        depths.append(int(formulas.in_flight_depth(formulas.in_flight_behind(depths[-1], 1, 0.0), 0.0, 0.0, 1.0, 1)))
    assert depths == [1, 2, 3, 4]
    # 3-2-1 with short all-reduces: one behind two replicas, then 2·2 behind three.
    assert formulas.in_flight_depth(1, 0.0, 0.0, 1.0, 2) == 2
    assert formulas.in_flight_depth(formulas.in_flight_behind(2, 2, 0.0), 0.0, 0.0, 1.0, 3) == 3
    # A transfer of a tenth of the step time needs one more.
    assert formulas.in_flight_depth(1, 0.0, 0.1, 1.0, 1) == 3
    # Rounding in the quotient does not add one.
    assert formulas.in_flight_depth(1, 0.0, 0.3 / 2, 0.1 * 3, 1) == 3


def test_a_group_waits_for_what_its_allreduce_exceeds_the_step_time_by() -> None:
    assert [float(formulas.group_wait(time, 2.0, 4)) for time in (0.0, 2.0, 3.0, 8.0)] == [0.0, 0.0, 0.5, 3.0]
    # In copies of the pipeline the bound is taken: seven of eight minibatches in one of two copies.
    assert formulas.group_wait(0.0, 2.0, 4, copies=2) == 3.5


def test_depth_and_step_time_are_inverse() -> None:
    for replicas in (1, 2, 3):
        for following in (1, 2, 5):
            for transfer in (0.1, 0.7, 1.3):
                for groups in ((0.0, 0.0), (1.4, 0.0), (1.4, 2.5)):
                    waits = [float(formulas.group_wait(group, 1.0, 3)) for group in groups]
                    depth = int(formulas.in_flight_depth(following + waits[1], waits[0], transfer, 1.0, replicas))
                    assert formulas.depth_limited_step_time(depth, replicas, following, transfer, groups) <= 1.0 + 1e-9
                    assert (
                        formulas.depth_limited_step_time(depth - 1, replicas, following, transfer, groups) > 1.0 - 1e-9
                    )
    assert math.isinf(formulas.depth_limited_step_time(1, 1, 1, 0.1, ()))
    assert formulas.depth_limited_step_time(2, 1, 1, 0.0, ()) == 0.0
    # A transfer too short to count when a depth is chosen does not count when the depth is judged.
    assert formulas.in_flight_depth(1, 0.0, 1e-10, 1.0, 1) == 2
    assert formulas.depth_limited_step_time(2, 1, 1, 1e-10, ()) <= 1.0


def test_memory() -> None:
    # Gradient and one state per parameter, buffers, boundary; then a version, what is saved, input and output for each
    # in flight; buckets for more than one replica, and a version for a late update.
    assert formulas.fixed_memory(100, 7, 20, 1.0, True) == 227
    assert 3 * formulas.memory_per_depth(100, 50, 4, 6) == 480
    assert formulas.fixed_memory(100, 7, 20, 1.0, False) == 127
    assert [int(formulas.replica_memory(100, r, schedules.update_lag(r, False))) for r in (1, 2)] == [0, 200]
    assert int(formulas.replica_memory(100, 4, schedules.update_lag(4, True))) == 100


def test_a_batch_of_the_flush_schedules_by_hand() -> None:
    # 8 minibatches on 3 replicas: the busiest has 3, of 5 s each.
    assert formulas.rounds(8, 3) == 3
    assert formulas.flush_busy(5.0, 8, 3) == 15.0
    # An all-reduce of 7 s hides behind a last backward pass of 4 s, of which half can hide it, or all.
    assert [float(formulas.flush_exposed(7.0, 4.0, share)) for share in (0.0, 0.5, 1.0)] == [7.0, 5.0, 3.0]
    assert float(formulas.flush_exposed(7.0, 9.0, 1.0)) == 0.0
    # 6 minibatches in flight behind two replicas: 3 each and one more, but no more than a replica has.
    assert [float(formulas.flush_depth(6, count, 2)) for count in (8, 6)] == [4.0, 3.0]


def test_two_versions_suffice_for_what_is_in_flight_and_the_wait_for_an_update() -> None:
    # 12 minibatches per update, 3 on each of 2 replicas in flight, and an all-reduce of 5 step times: 6 + 4 ≤ 12.
    assert formulas.buffered_synchronisation(24.0, 12) == 2.0
    # At twice that speed it takes 9: 6 + 9 > 12. The step time that it allows is where both are equal.
    step_time = formulas.buffered_step_time(3, 2, 10.0, 12)
    assert 6 + 10.0 / step_time - 1 == pytest.approx(12)
    assert math.isinf(formulas.buffered_step_time(7, 2, 0.0, 12))
    assert formulas.buffered_step_time(6, 2, 0.0, 12) == 0.0
    # In two copies a group's last minibatch may be half a step time of this copy later.
    step_time = formulas.buffered_step_time(2, 2, 10.0, 6, copies=2)
    assert 4 + 10.0 / step_time - 1 / 2 == pytest.approx(6)


def test_vertical_sync_keeps_versions_by_what_the_input_stage_has_in_flight() -> None:
    # Straight: as many everywhere. Delay 3 at two replicas: 6 minibatches, one version each behind one replica.
    assert [int(schedules.vertical_versions(4, 1, 1)), int(schedules.vertical_versions(3, 2, 1))] == [4, 6]
    assert [int(schedules.vertical_versions(3, 2, 2)), int(schedules.vertical_versions(3, 2, 4))] == [3, 2]
    assert int(schedules.vertical_versions(3, 2, 3)) == 1 + 2


def test_recomputation_takes_another_forward_pass_and_holds_one_minibatch_beside_the_inputs() -> None:
    assert [float(formulas.backward_time(1.0, 2.0, again)) for again in (False, True)] == [2.0, 3.0]
    assert [float(formulas.recompute_memory(50, 6, again)) for again in (False, True)] == [0.0, 56.0]
    assert float(formulas.memory_per_depth(100, 50, 4, 6, recompute=True)) == 104.0
    assert float(formulas.memory_per_depth(100, 50, 4, 6, stashes=False, recompute=True)) == 4.0
    assert float(formulas.memory_per_depth(100, 50, 4, 6, stashes=False)) == 60.0
    assert formulas.version_memory(100, 2) == 200


def test_parallel_links_share_what_crosses_a_boundary() -> None:
    assert formulas.boundary_time(100, 10.0, 4) == 2.5
