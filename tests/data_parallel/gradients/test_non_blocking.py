"""Deferred updates: whatever is called in whatever order, the numbers are those of plain torch."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_models import (
    OPTIMIZERS,
    SHAPES,
    assert_replicas_equal,
    assert_same_gradients,
    assert_same_parameters,
    batch,
    built,
    encoder,
    loss_of,
    mlp,
    train_alike,
)
from tests.repeated import repeated
from torch import nn

from unisono.comm import world
from unisono.data_parallel import DataParallel, DataParallelOptimizer

on_both = pytest.mark.ranks(2, backend=["gloo", "shm"], timeout=60)


def never_early(model):
    """Let messages arrive only when somebody waits, so that every step is owed."""
    engine = model._engine
    engine.has_arrived = lambda bucket: bucket not in engine.under_way


class Pair:
    """A non-blocking model and its one-process twin, driven alike."""

    def __init__(self, make=mlp, optimizer="sgd", shape=(6,), **options):
        module, self.twin = built(make)
        self.shape, self.step_count = shape, 0
        make_optimizer = OPTIMIZERS.get(optimizer, optimizer)
        self.inner = make_optimizer(module.parameters())
        self.optimizer = DataParallelOptimizer(self.inner)
        options = {"bucket_mb": 0.001, **options}
        self.model = DataParallel(module, None, self.optimizer, **options)
        self.twin_optimizer = make_optimizer(self.twin.parameters())
        self.losses = None
        never_early(self.model)

    def forward(self):
        everything, mine = batch(self.shape, self.step_count)
        self.step_count += 1
        self.losses = loss_of(self.model(mine)), loss_of(self.twin(everything))

    def backward(self):
        for loss in self.losses or ():
            loss.backward()
        self.losses = None

    def step(self):
        self.optimizer.step()
        self.twin_optimizer.step()
        self.losses = None  # plain torch refuses a backward through what was updated since

    def zero_grad(self, set_to_none=False):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.twin_optimizer.zero_grad(set_to_none=set_to_none)

    def check(self):
        assert_same_parameters(self.model.module, self.twin, rtol=1e-11)

    def whole_step(self):
        self.zero_grad()
        self.forward()
        self.backward()
        self.step()


@pytest.mark.ranks(2, backend="gloo", timeout=30)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    calls=st.lists(
        st.sampled_from(
            [
                "forward",
                "forward backward",
                "zero_grad forward backward step",
                "backward",
                "step",
                "zero_grad",
                "none",
                "eval",
                "train",
                "state_dict",
                "inner state_dict",
                "optimizer state_dict",
                "deepcopy",
                "pickle",
                "read gradients",
                "read a parameter",
            ]
        ),
        min_size=3,
        max_size=12,
    )
)
def test_every_order_of_calls_gives_the_numbers_of_plain_torch(calls):
    pair = Pair()
    state = torch.random.get_rng_state()
    for call in " ".join(
        c if " " not in c or c.startswith(("forward", "zero")) else c.replace(" ", "_")
        for c in calls
    ).split():
        if call in ("forward", "backward", "step", "zero_grad"):
            getattr(pair, call)()
        elif call == "none":
            pair.zero_grad(set_to_none=True)
        elif call in ("eval", "train"):
            getattr(pair.model, call)()
        elif call in ("state_dict", "inner_state_dict"):
            found = pair.model if call == "state_dict" else pair.model.module
            for key, value in found.state_dict().items():
                wanted = pair.twin.state_dict()[key.removeprefix("module.")]
                torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-11)
        elif call == "optimizer_state_dict":
            mine, theirs = pair.optimizer.state_dict(), pair.twin_optimizer.state_dict()
            assert mine["state"].keys() == theirs["state"].keys()
        elif call == "deepcopy":
            assert_same_parameters(copy.deepcopy(pair.model.module), pair.twin, rtol=1e-11)
        elif call == "pickle":
            assert_same_parameters(
                pickle.loads(pickle.dumps(pair.model.module)), pair.twin, rtol=1e-11
            )
        elif call == "read_gradients":
            assert_same_gradients(pair.model.module, pair.twin, rtol=1e-10)
        else:
            first = pair.model.module[0].weight
            torch.testing.assert_close(first, pair.twin[0].weight, rtol=1e-11, atol=1e-11)
    assert torch.equal(torch.random.get_rng_state(), state)
    pair.model.finalize()
    assert not pair.model.pending
    pair.check()


@on_both
def test_a_step_is_owed_and_paid_by_the_first_read():
    pair = Pair()
    pair.whole_step()
    assert pair.model._fwd_hook_handles
    assert pair.optimizer.update_next
    pair.model.finalize()
    assert not pair.optimizer.update_next
    pair.whole_step()
    assert pair.optimizer.update_next
    torch.testing.assert_close(pair.model.module[0].weight, pair.twin[0].weight)
    pair.model.eval()
    pair.check()


@on_both
def test_the_state_of_the_optimizer_inside_is_complete_too():
    pair = Pair(optimizer="adam")
    for _ in range(2):
        pair.whole_step()
        mine, wanted = pair.inner.state_dict(), pair.twin_optimizer.state_dict()
        assert mine["state"].keys() == wanted["state"].keys()
        for i, values in wanted["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(mine["state"][i][key], value, rtol=1e-11, atol=1e-11)
    pair.whole_step()
    pair.inner.load_state_dict(mine)  # does not reach back to the step before it
    pair.check()


@on_both
def test_an_update_paid_in_inference_mode_leaves_ordinary_tensors():
    pair = Pair(optimizer="adam")
    for evaluates in (False, True, False):
        pair.whole_step()
        assert pair.optimizer.update_next
        with torch.inference_mode():
            pair.model.train(not evaluates)
            assert pair.model(batch(pair.shape)[1]).is_inference()
            assert not pair.model.pending
            assert torch.is_inference_mode_enabled()
        pair.model.train()
        state = [x for values in pair.inner.state.values() for x in values.values()]
        params = list(pair.model.module.parameters())
        assert state
        assert not any(x.is_inference() for x in [*state, *params, *(p.grad for p in params)])
    pair.check()


@on_both
def test_clipping_is_exact_before_the_step():
    for ours in (True, False):
        pair = Pair()
        for _ in range(3):
            pair.zero_grad()
            pair.forward()
            pair.backward()
            wanted = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1)
            if ours:
                norm = pair.model.clip_grad_norm(0.1)
            else:
                norm = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
            torch.testing.assert_close(norm, wanted)
            pair.step()
        pair.model.finalize()
        pair.check()


@on_both
def test_a_gradient_written_to_while_it_travels_is_refused():
    """Parameter objects that were taken earlier reach gradients past the wrapper."""
    pair = Pair()
    taken = list(pair.model.parameters())
    pair.zero_grad()
    pair.forward()
    pair.backward()
    nn.utils.clip_grad_norm_(taken, 0.1)
    with pytest.raises(RuntimeError, match=r"(?s)written to while they travelled.*HINT: model.fin"):
        pair.model.finalize()
    world().barrier()


class ReadsEarly(nn.Module):
    """Uses the weights of a layer whose own forward is never called, as attention does."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.read = nn.Linear(5, 3)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.first(x)), self.read.weight, self.read.bias)


@on_both
def test_layers_whose_forward_is_not_called_are_updated_before_they_are_read():
    pair = Pair(make=ReadsEarly)
    for _ in range(4):
        pair.whole_step()
        assert pair.optimizer.update_next
    pair.model.finalize()
    pair.check()


@on_both
def test_a_layer_that_is_added_later_is_updated_before_its_forward():
    pair = Pair(make=lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
    pair.whole_step()
    hooks = len(pair.model._fwd_hook_handles)
    torch.manual_seed(3)
    added = nn.Linear(3, 3).double()
    for net, optimizer in ((pair.model.module, pair.inner), (pair.twin, pair.twin_optimizer)):
        net.append(copy.deepcopy(added))
        optimizer.add_param_group({"params": list(net[-1].parameters())})
    for _ in range(3):
        pair.whole_step()
        assert pair.optimizer.update_next
    assert len(pair.model._fwd_hook_handles) == hooks + 1
    pair.model.finalize()
    pair.check()


@on_both
def test_a_scheduler_per_batch_does_not_reach_back_to_an_owed_update():
    for on_inner, by_step in itertools.product((True, False), repeat=2):
        pair = Pair(optimizer="adamw")
        target = pair.inner if on_inner else pair.optimizer
        optimizers = (target, pair.twin_optimizer)
        make, step_lr = torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.StepLR
        schedulers = [make(opt, max_lr=0.1, total_steps=8) for opt in optimizers]
        if by_step:
            schedulers = [step_lr(opt, step_size=2, gamma=0.3) for opt in optimizers]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(6):
                pair.whole_step()
                for scheduler in schedulers:
                    scheduler.step()
        pair.model.finalize()
        pair.check()


@on_both
def test_a_grad_scaler_skips_on_all_ranks_together():
    module, _ = built(mlp, torch.float32)
    optimizer = DataParallelOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    model = DataParallel(module, None, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in module.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(batch((6,), step, torch.float32)[1]).float())
        if step == 0 and world().rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.finalize()
        same = all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
        assert same == (step == 0)
        flat = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        assert world().all_equal(flat)
    assert scaler.get_scale() == 2.0


class ByNorm(torch.optim.SGD):
    """Steps along the gradient of all parameters together, cut to length 1."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


class InGroups(torch.optim.SGD):
    """Keeps what it learns in its groups, as Prodigy, D-Adaptation and schedule-free do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
            group["seen"] = group.get("seen", 0.0) + float(sum(norms))
            group["lr"] = 0.1 / (group["k"] + group["seen"])
        return super().step(closure)


@on_both
@repeated("make", [InGroups, ByNorm])
def test_an_optimizer_that_sees_all_parameters_together_is_never_deferred(make):
    """Not even by chance, where messages are late on one rank only: there ranks would part."""
    module, twin = built(mlp)
    optimizer = DataParallelOptimizer(make(module.parameters(), lr=0.5))
    with pytest.warns(UserWarning, match=f"updates are blocking: {make.__name__} is not known"):
        model = DataParallel(module, None, optimizer, bucket_mb=0.001)
    twin_optimizer = make(twin.parameters(), lr=0.5)
    if world().rank == 1:
        never_early(model)
    train_alike((model, optimizer), (twin, twin_optimizer), 6)
    assert not optimizer.update_next
    assert_same_parameters(module, twin, rtol=1e-11)
    assert_replicas_equal(module)
    (group,), (wanted,) = optimizer.param_groups, twin_optimizer.param_groups
    assert group.keys() == wanted.keys()
    for key in group.keys() - {"params"}:
        assert group[key] == pytest.approx(wanted[key]), key
    assert group.get("k", 6) == 6


@on_both
def test_a_step_with_hooks_is_whole_and_runs_them_once():
    pair = Pair()
    calls = []
    pair.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    patched = Pair()
    plain_step = patched.inner.step

    def counted(closure=None):
        calls.append("patched")
        return plain_step(closure)

    patched.inner.step = counted
    for one in (pair, patched):
        for _ in range(3):
            one.whole_step()
        one.model.finalize()
        one.check()
    assert calls == ["post"] * 3 + ["patched"] * 3


@pytest.mark.ranks(2, timeout=90)
def test_compiled_code_finds_every_parameter_updated():
    pair = Pair(make=lambda: torch.compile(mlp(), backend="eager"))
    for _ in range(3):
        pair.whole_step()
        assert pair.optimizer.update_next
    pair.model.finalize()
    pair.check()


@on_both
def test_groups_frozen_parameters_and_another_order_stay_non_blocking():
    module, twin = built(mlp)
    module[0].bias.requires_grad_(False)
    twin[0].bias.requires_grad_(False)

    def groups(of):
        params = list(of.parameters())
        return [{"params": params[::-1][:3], "lr": 0.2}, {"params": params[::-1][3:]}]

    optimizer = DataParallelOptimizer(torch.optim.SGD(groups(module), lr=0.05, momentum=0.9))
    twin_optimizer = torch.optim.SGD(groups(twin), lr=0.05, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DataParallel(module, None, optimizer, bucket_mb=0.001)
    assert not model.blocking_parameter_updates
    assert all("0.bias" not in bucket.names for bucket in model.buckets)
    train_alike((model, optimizer), (twin, twin_optimizer), 4)
    model.finalize()
    assert_same_parameters(module, twin)


@on_both
def test_what_cannot_be_deferred_warns_once_and_blocks():
    for case in ("two", "subset", "lbfgs"):
        module, twin = built(mlp)

        def optimizers_of(one, case=case):
            params = list(one.parameters())
            if case == "lbfgs":
                return [torch.optim.LBFGS(params, lr=0.1, max_iter=3)]
            parts = (params[:2], params[2:]) if case == "two" else (params[:2],)
            return [torch.optim.SGD(part, lr=0.1) for part in parts]

        twin_inner = optimizers_of(twin)
        optimizers = [DataParallelOptimizer(opt) for opt in optimizers_of(module)]
        with pytest.warns(UserWarning, match="updates are blocking") as caught:
            model = DataParallel(module, None, optimizers)
        assert len(caught) == 1
        assert model.blocking_parameter_updates
        assert all(opt.blocking_parameter_updates for opt in optimizers)
        everything, mine = batch((6,))
        for one, opts, x in ((model, optimizers, mine), (twin, twin_inner, everything)):

            def closure(one=one, opts=opts, x=x):
                for opt in opts:
                    opt.zero_grad()
                loss = loss_of(one(x))
                loss.backward()
                return loss

            if case == "lbfgs":
                assert opts[0].step(closure) is not None
            else:
                closure()
                for opt in opts:
                    opt.step()
        rtol = 1e-6 if case == "lbfgs" else 1e-12
        assert_same_parameters(module, twin, rtol=rtol)


@on_both
def test_a_deepcopy_trains_in_parallel_on_its_own():
    pair = Pair(optimizer="adam")
    pair.whole_step()
    twin_model = copy.deepcopy(pair.model)
    inner = twin_model._dp_optimizers[0]
    assert inner is not pair.optimizer
    own = {id(p) for p in twin_model.parameters()}
    assert {id(p) for p in inner.params_ref} == own
    pair.model, pair.optimizer = twin_model, inner
    pair.whole_step()
    pair.whole_step()
    pair.model.finalize()
    pair.check()


@on_both
def test_a_pickled_model_starts_again_at_its_first_forward():
    pair = Pair(make=encoder, shape=SHAPES[encoder])
    pair.whole_step()
    pair.model, pair.optimizer = pickle.loads(pickle.dumps((pair.model, pair.optimizer)))
    assert pair.model.comm == world()
    assert pair.model._dp_optimizers[0] is pair.optimizer
    with torch.inference_mode():
        pair.model(torch.ones(2, *SHAPES[encoder]).double())  # evaluated before it is trained on
    for _ in range(2):
        pair.whole_step()
    pair.model.finalize()
    pair.check()


@on_both
def test_a_model_that_ends_with_an_update_owed_says_so():
    pair = Pair()
    pair.whole_step()
    pair.model.finalize()
    module = pair.model.module
    pair.zero_grad()
    pair.forward()
    pair.backward()
    pair.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.model = None
    assert any(issubclass(w.category, ResourceWarning) for w in caught)
    assert not module[0]._forward_pre_hooks
    assert not module._state_dict_pre_hooks
    loss_of(module(batch((6,))[1])).backward()  # an ordinary module again
    world().barrier()


def test_an_optimizer_without_a_model_acts_at_once():
    layer = nn.Linear(2, 1)
    optimizer = DataParallelOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    assert optimizer.step(lambda: 7) == 7
    assert torch.allclose(layer.weight, before - 0.1)
    optimizer.zero_grad()
    assert torch.equal(layer.weight.grad, torch.zeros(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.torch_optimizer.param_groups
    for bad in (3, "x", layer):
        with pytest.raises(TypeError, match="torch optimizer"):
            DataParallelOptimizer(bad)
    with pytest.raises(TypeError, match="blocking"):
        DataParallelOptimizer(optimizer.torch_optimizer, "x")
