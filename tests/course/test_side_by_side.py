"""Networks side by side train as each would alone."""

import torch
import torch.nn.functional as F

from ignite_ddl.course import SideBySide

STEPS = 3


def trained(rates, n_seeds):
    networks = SideBySide(rates, n_seeds)
    weights = networks.start()
    for _ in range(STEPS):
        weights = networks.step(weights, networks.gradients(weights))
    return networks, weights


def test_a_network_is_the_same_beside_others_and_alone():
    _, together = trained([0.4, 0.1], n_seeds=2)
    _, alone = trained([0.1], n_seeds=1)
    for one, many in zip(alone, together, strict=True):
        torch.testing.assert_close(one[0], many[2])  # rate 0.1, seed 0
        assert not torch.equal(many[2], many[3])
        assert not torch.equal(many[0], many[2])


def test_gradients_are_those_of_the_mean_loss_of_a_network():
    networks = SideBySide([0.1], n_seeds=2)
    rows = torch.randint(6000, (16,), generator=torch.Generator().manual_seed(1000))
    first, bias, second, last = (weight[0].requires_grad_() for weight in networks.start())
    outputs = (networks.tiles[rows] @ first + bias).relu() @ second + last
    expected = torch.autograd.grad(F.cross_entropy(outputs, networks.labels[rows]), (first, bias, second, last))
    found = networks.gradients(networks.start())
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient[0], right)


def test_a_reader_has_rows_of_its_own_and_only_its_classes():
    both = SideBySide([0.4, 0.1], n_seeds=2, classes=((3, 4), range(10)))
    assert set(both.labels[both.images[0]].tolist()) == {3, 4}
    assert [source.initial_seed() for sources in both.rows for source in sources] == [1000, 1001, 2000, 2001]
    assert len(set(both.test_labels.tolist())) == 10
    alone = [SideBySide([0.4, 0.1], n_seeds=2, classes=[own]) for own in ((3, 4), range(10))]
    alone[1].rows = [[torch.Generator().manual_seed(2000 + seed) for seed in range(2)]]
    start = both.start()
    for weights in (start, [torch.stack((weight, 2 * weight)) for weight in start]):  # the same, and apart
        found = both.gradients(weights)
        for reader, one in enumerate(alone):
            of_reader = [weight if weight.ndim == 3 else weight[reader] for weight in weights]
            for many, right in zip(found, one.gradients(of_reader), strict=True):
                torch.testing.assert_close(many[reader], right)


def test_losses_are_those_of_the_test_images():
    networks = SideBySide([0.1], n_seeds=2)
    first, bias, second, last = (weight[1] for weight in networks.start())
    outputs = (networks.test_tiles @ first + bias).relu() @ second + last
    torch.testing.assert_close(networks.losses(networks.start())[0, 1], F.cross_entropy(outputs, networks.test_labels))
