"""A message-passing potential with forces over dp x gp ranks: everything equals one process."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from unisono import Mesh
from unisono import graph_parallel as gp
from unisono.comm import check, world
from unisono.data_parallel import DataParallel
from unisono.errors import CollectiveMismatch, LayoutError, MeshError
from unisono.graph_parallel import GraphPartition

CUTOFF = 1.3


def molecule(seed, atoms):
    draw = torch.Generator().manual_seed(seed)
    pos = torch.rand(atoms, 3, dtype=torch.float64, generator=draw) * 2
    target = torch.randn(atoms, 3, dtype=torch.float64, generator=draw)
    return pos, gp.radius_graph(pos, CUTOFF).edge_index, target


class Potential(nn.Module):
    """Two layers of messages; `head` is used after the last reduce, on the replicated energy."""

    def __init__(self, width=5, head=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(width))
        self.messages = nn.ModuleList(nn.Linear(2 * width + 1, width) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.energy = nn.Linear(width, 1)
        self.head = nn.Linear(1, 1) if head else None
        self.double()

    def atom_energies(self, pos, source, target, rows_of, sum_messages):
        apart = (rows_of(pos)[source] - pos[target]).norm(dim=1, keepdim=True)
        x = self.embed.expand(len(pos), -1)
        for message, update in zip(self.messages, self.updates, strict=True):
            total = sum_messages(x, message, torch.exp(-apart))
            x = x + torch.tanh(update(total))
        return self.energy(x)


def serial_loss(model, sample):
    """Plain torch, no graph_parallel in sight."""
    pos, edges, target_force = sample
    pos = pos.clone().requires_grad_()
    source, target = edges

    def sum_messages(x, message, near):
        sent = torch.tanh(message(torch.cat([x[source], x[target], near], 1)))
        return torch.zeros_like(x).index_add(0, target, sent)

    energy = model.atom_energies(pos, source, target, lambda t: t, sum_messages).sum()
    (force,) = torch.autograd.grad(-energy, pos, create_graph=True)
    total = energy if model.head is None else model.head(energy.reshape(1, 1)).sum()
    return total**2 / 10 + ((force - target_force) ** 2).sum(), energy.detach(), force.detach()


def parallel_loss(model, sample, part, mode="halo", comm=None):
    pos, edges, target_force = sample
    plan = gp.GraphPlan(part, edges, comm=comm)
    source, target = plan.edge_index
    if mode == "halo":
        mine = plan.scatter(pos).requires_grad_()
        rows_of = plan.extend
    else:  # every rank holds all positions
        mine = pos.clone().requires_grad_()

    def halo_messages(x, message, near):
        def send(x_src, x_dst, near):
            return torch.tanh(message(torch.cat([x_src, x_dst, near], 1)))

        return plan.message_pass(x, send, edge_attr=near)

    def gather_messages(x, message, near):
        rows = gp.gather(x, grad="sum", sizes=part.sizes, comm=plan.comm)
        ends = part.inverse[edges[:, plan.edge_ids]]
        sent = torch.tanh(message(torch.cat([rows[ends[0]], x[target], near], 1)))
        return torch.zeros_like(x).index_add(0, target, sent)

    if mode == "halo":
        atoms = model.atom_energies(mine, source, target, rows_of, halo_messages)
    else:
        own, everyone = mine[plan.local_nodes], torch.cat([plan.local_nodes, plan.halo_nodes])
        atoms = model.atom_energies(own, source, target, lambda _: mine[everyone], gather_messages)
    term = atoms.sum()
    (force,) = torch.autograd.grad(-term, mine, create_graph=True)
    energy = plan.reduce(term, grad="identity")
    if mode == "halo":  # own forces, complete
        force_loss = plan.reduce(((force - plan.scatter(target_force)) ** 2).sum(), grad="identity")
        whole_force = plan.gather(force.detach(), grad="slice")
    else:  # positions are replicated: each rank has a term of every force
        force = plan.reduce(force, grad="identity")
        force_loss = ((force - target_force) ** 2).sum()
        whole_force = force.detach()
    total = energy if model.head is None else model.head(energy.reshape(1, 1)).sum()
    return total**2 / 10 + force_loss, energy.detach(), whole_force


def grads_of(model):
    return [p.grad.clone() for p in model.parameters()]


def expected(samples, head=False):
    model = Potential(head=head)
    results = [serial_loss(model, sample) for sample in samples]
    (sum(loss for loss, *_ in results) / len(samples)).backward()
    return results, grads_of(model)


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=1e-10, rtol=1e-10)


def partitions(pos, edges, parts):
    yield GraphPartition.contiguous(len(pos), parts)
    yield GraphPartition.from_owner(torch.arange(len(pos)) * 3 % parts, parts)
    yield GraphPartition.balanced(edges, len(pos), parts, order="morton", pos=pos)


@pytest.mark.ranks([1, 2, 3, 4], timeout=60)
def test_outputs_forces_and_gradients_equal_one_process():
    comm = world()
    with gp.use_groups(gp.graph_groups(comm.size)):
        # with fewer atoms than ranks, partitions hardly differ
        for atoms, some in ((1, slice(1)), (comm.size - 1, slice(1, 2)), (9, slice(3))):
            sample = molecule(atoms, atoms)
            ((loss, energy, force),), grads = expected([sample])
            for part in list(partitions(*sample[:2], comm.size))[some]:
                for mode in ("halo", "gather"):
                    model = Potential()
                    found = parallel_loss(model, sample, part, mode)
                    assert_equal(found, (loss, energy, force))
                    found[0].backward()
                    gp.sync_gradients(model)
                    assert_equal(grads_of(model), grads)


SAMPLES = (7, 10)


def local_loss(model, size=2):
    sample = molecule(SAMPLES[gp.get_dp_rank()], SAMPLES[gp.get_dp_rank()])
    part = GraphPartition.morton(sample[0], size)
    return parallel_loss(model, sample, part)


class WholeLoss(nn.Module):
    """The loss as a module, which is what wrappers wrap."""

    def __init__(self):
        super().__init__()
        self.potential = Potential()

    def forward(self):
        return local_loss(self.potential)[0]


# a column of one output has a gradient of another stride than DDP wants
@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket:UserWarning")
@pytest.mark.ranks(4, timeout=60, backend=["gloo", "shm"])
def test_two_by_two_ranks_equal_one_process_by_all_ways():
    gp.setup_gp({"gp_gpus": 2, "distributed_backend": None})
    results, grads = expected([molecule(n, n) for n in SAMPLES])
    _, energy, force = results[gp.get_dp_rank()]

    model = Potential()
    loss, *found = local_loss(model)
    assert_equal(found, (energy, force))
    loss.backward()
    gp.sync_gradients(model.parameters())
    assert_equal(grads_of(model), grads)

    over_world = DistributedDataParallel(WholeLoss())
    gp.scale_backward_grad(over_world()).backward()
    assert_equal(grads_of(over_world), grads)

    over_dp = DistributedDataParallel(WholeLoss(), process_group=gp.get_dp_group())
    over_dp().backward()
    for p in over_dp.parameters():
        dist.all_reduce(p.grad, group=gp.get_gp_group())
    assert_equal(grads_of(over_dp), grads)
    gp.cleanup_gp()


@pytest.mark.ranks(4, timeout=60)
def test_unisono_data_parallel_over_the_data_axis_and_over_the_world():
    mesh = Mesh(dp=2, gp=2)
    _, grads = expected([molecule(n, n) for n in SAMPLES])
    with gp.use_groups(mesh):
        model = DataParallel(WholeLoss(), comm=mesh.comm("dp"))
        model().backward()
        for p in model.parameters():
            mesh.comm("gp").all_reduce_(p.grad)
        assert_equal(grads_of(model), grads)
        model = DataParallel(WholeLoss())
        gp.scale_backward_grad(model()).backward()
        assert_equal(grads_of(model), grads)


@pytest.mark.ranks(4, timeout=60)
def test_a_replicated_head_is_averaged_over_the_row_and_check_mode_finds_a_wrong_one():
    with gp.use_groups(Mesh(dp=2, gp=2)):
        _, grads = expected([molecule(n, n) for n in SAMPLES], head=True)
        model = Potential(head=True)
        local_loss(model)[0].backward()
        with check():
            with pytest.raises(LayoutError, match="gradient 0 of them"):
                gp.sync_gradients(model, replicated=model.energy.parameters())
            gp.sync_gradients(model, replicated=model.head)
        assert_equal(grads_of(model), grads)


@pytest.mark.ranks(2)
def test_missing_gradients_count_as_zero_and_unused_parameters_keep_none():
    comm = world()
    with gp.use_groups(gp.graph_groups(2)):
        used, half, unused = (nn.Parameter(torch.ones(3)) for _ in range(3))
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        (used * 2).sum().backward()
        if comm.rank == 0:
            half.sum().backward()
        with pytest.raises(LayoutError, match="not among the parameters"):
            gp.sync_gradients([used], replicated=[half])  # whose gradient nobody would bring
        gp.sync_gradients([used, half, unused, frozen], bucket_mb=1e-5)
        assert used.grad.tolist() == [4.0] * 3
        assert half.grad.tolist() == [1.0] * 3
        assert unused.grad is None
        assert frozen.grad is None


@pytest.mark.ranks(2)
def test_sync_gradients_before_set_up_names_it():
    with pytest.raises(MeshError, match="setup_gp"):
        gp.sync_gradients([nn.Parameter(torch.ones(1))])


def test_in_one_process_sync_gradients_changes_nothing():
    p = nn.Parameter(torch.ones(2))
    (3 * p).sum().backward()
    gp.sync_gradients([p])
    assert p.grad.tolist() == [3.0, 3.0]


class LargestTensor(TorchDispatchMode):
    """Remembers the most rows that any tensor of node features had."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] == self.width:
                self.rows = max(self.rows, t.shape[0])
        return out


@pytest.mark.ranks(4)
def test_no_rank_ever_holds_a_row_of_features_for_every_node():
    comm = world()
    nodes, width = 400, 7
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    edges = torch.cat([ring, ring.flip(0)], 1)
    plan = gp.GraphPlan(GraphPartition.contiguous(nodes, comm.size), edges, comm=comm)
    x = torch.randn(plan.num_local, width, requires_grad=True)
    with LargestTensor(width) as seen:
        y = plan.message_pass(x, lambda a, b, _: (a * b).sin())
        (force,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (force**2).sum().backward()
    assert plan.num_local <= seen.rows <= 2 * nodes // comm.size + 4  # its own edges


@pytest.mark.ranks(2)
def test_a_model_without_errors_passes_check_mode():
    with gp.use_groups(gp.graph_groups(2)), check():
        sample = molecule(6, 6)
        for mode in ("halo", "gather"):
            model = Potential()
            part = GraphPartition.contiguous(6, 2)
            loss, *_ = parallel_loss(model, sample, part, mode)
            loss.backward()


@pytest.mark.ranks(4, timeout=60)
def test_a_wrapped_model_has_whole_gradients_after_every_backward():
    comm = world()
    with gp.use_groups(Mesh(dp=2, gp=2)):
        _, grads = expected([molecule(n, n) for n in SAMPLES], head=True)
        plain = Potential(head=True)
        names = list(plain.state_dict())
        with torch.no_grad():
            for p in plain.parameters():
                p += comm.rank  # all but the first are wrong, and are given its values
        net = gp.GraphParallel(plain, replicated=plain.head)
        assert list(net.state_dict()) == names
        for model in (net, copy.deepcopy(net)):
            local_loss(model.module)[0].backward()
            assert_equal(grads_of(model.module), grads)
            local_loss(model.module)[0].backward()  # onto what is there, as torch does
            assert_equal(grads_of(model.module), [2 * g for g in grads])
            with (
                pytest.raises(LayoutError, match=r"no_sync\(\)[\s\S]*summed again"),
                model.no_sync(),
            ):
                local_loss(model.module)[0].backward()
            for to_none in (True, False):
                model.zero_grad(set_to_none=to_none)
                with model.no_sync():
                    local_loss(model.module)[0].backward()
                local_loss(model.module)[0].backward()
                assert_equal(grads_of(model.module), [2 * g for g in grads])
            with pytest.raises(LayoutError, match="leave sync_gradients out"):
                gp.sync_gradients(model)
            model.zero_grad()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            local_loss(net.module)[0].backward()
            optimizer.step()
        for p in net.parameters():
            assert torch.equal(p.detach(), comm.broadcast(p.detach(), 0)), "replicas differ"


class Fails(nn.Module):
    """Its backward fails when told so."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 1)
        self.fails = False

    def forward(self, x):
        y = self.first(x)
        if self.fails:
            y.register_hook(lambda _: 1 / 0)
        return self.last(y).sum()


@pytest.mark.ranks(2)
def test_a_backward_that_fails_loses_no_gradient_and_unfrozen_parameters_are_kept_too():
    groups = gp.graph_groups(2)
    model = Fails()
    model.first.requires_grad_(False)
    net = gp.GraphParallel(model, groups=groups)
    x = torch.ones(1, 2) * (1 + groups.gp.rank)
    net(x).backward()
    before = model.last.weight.grad.clone()
    model.first.requires_grad_(True)
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        net(x).backward()
    model.fails = False
    loss = net(x)
    assert torch.equal(model.last.weight.grad, before)
    net.zero_grad()
    loss.backward()
    assert model.first.bias.grad == pytest.approx(2 * model.last.weight.detach()[0])
    gone = weakref.ref(net)
    del net, model, loss
    gc.collect()
    assert gone() is None, "nothing keeps a model alive that nobody uses"


@pytest.mark.ranks(2)
def test_an_older_graph_and_a_copy_are_summed_after_a_backward_that_fails():
    groups = gp.graph_groups(2)
    net = gp.GraphParallel(Fails(), groups=groups)
    x = torch.ones(1, 2) * (1 + groups.gp.rank)
    net(x).backward()
    wanted = grads_of(net.module)
    older, net.module.fails = net(x), True
    with pytest.raises(ZeroDivisionError):
        net(x).backward()
    other = copy.deepcopy(net)
    net.zero_grad()
    older.backward()
    assert_equal(grads_of(net.module), wanted)
    other.module.fails = False
    other.zero_grad()
    other(x).backward()
    assert_equal(grads_of(other.module), wanted)
    other.zero_grad()
    checkpoint(other, x.requires_grad_(), use_reentrant=False).backward()
    assert_equal(grads_of(other.module), wanted)


@pytest.mark.ranks(2)
def test_models_that_differ_are_refused():
    groups = gp.graph_groups(2)
    with pytest.raises(CollectiveMismatch, match="build the same model"):
        gp.GraphParallel(nn.Linear(2, 1 + groups.gp.rank), groups=groups)
    with pytest.raises(TypeError, match="expected Module"):
        gp.GraphParallel("model", groups=groups)
