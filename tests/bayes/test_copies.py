"""Copies of nets: pickled, deep-copied, sent to ranks and returned from them; they learn on."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from tests.bayes.nets import learn, trained

from unisono.bayes import BatchNorm2d, DDPConfig, DDPSequential, Linear, ReLU, Sequential
from unisono.comm import world


def through_pickle(net):
    return pickle.loads(pickle.dumps(net))


def build():
    return Sequential(Linear(3, 4), BatchNorm2d(4), ReLU(), Linear(4, 1))


X = np.random.default_rng(0).normal(size=(8, 3))
Y = np.random.default_rng(1).normal(size=8)


@pytest.mark.parametrize("copied", [through_pickle, copy.deepcopy])
def test_a_copy_has_the_deltas_that_wait_and_learns_on_as_the_original_does(copied):
    net = learn(build(), X, Y)
    twin = copied(net)
    for act in (lambda one: one.step(), lambda one: trained(one, X, Y)):
        before = twin.state_dict(running=True)
        assert before == net.state_dict(running=True)
        for one in (net, twin):
            act(one)
        assert twin.state_dict(running=True) == net.state_dict(running=True) != before
    assert twin.get_neg_var_w_counter() == net.get_neg_var_w_counter()


def test_a_pickled_net_is_as_large_as_its_parameters():
    wide = Sequential(*(Linear(100, 100) for _ in range(6)))
    numbers = 6 * 100 * 101
    assert len(pickle.dumps(wide)) < 1.2 * 4 * (2 + 2) * numbers  # and their deltas


@pytest.mark.ranks(2)
def test_the_net_of_a_data_parallel_run_can_leave_it():
    mine = slice(world().rank, None, 2)
    ddp = DDPSequential(build(), DDPConfig([], backend="auto"), sync_norm_stats="batch")
    trained(ddp, X[mine], Y[mine])
    twin = copy.deepcopy(ddp)  # still talks to the other ranks
    for one in (ddp, twin):
        trained(one, X[mine], Y[mine])
    twin.check_sync()
    assert twin.state_dict(running=True) == ddp.state_dict(running=True)
    if world().rank == 0:  # alone: would wait for the others if it still talked to them
        home = through_pickle(ddp.model)
        assert home[1].sum_over_ranks is None
        before = home.state_dict()
        trained(home, X, Y)
        assert home.state_dict() != before
