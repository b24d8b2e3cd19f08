import torch
from torch import nn

from breeze_rtc.models.cpu_layout import keep_by_inputs


def test_only_where_weights_lie_changes() -> None:
    """What a model says of its weights, and what it makes of any number of rows, stay; the weights of linear layers
    stand by inputs, all others as they were."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(96, 256, bias=False), nn.Linear(256, 40), nn.LayerNorm(40))
    table = nn.Embedding(8, 96)
    whole = nn.ModuleDict({"table": table, "model": model})
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    inputs = [table(torch.arange(8))[:rows].detach() for rows in (1, 2, 7)]
    with torch.no_grad():
        said = [model(x) for x in inputs]
        keep_by_inputs(whole)
        for x, expected in zip(inputs, said, strict=True):
            torch.testing.assert_close(model(x), expected)
    after = whole.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert model[0].weight.stride(0) == model[1].weight.stride(0) == 1
    assert table.weight.stride(1) == 1


def test_narrow_weights_stay() -> None:
    """Other types have products of their own."""
    layer = nn.Linear(32, 64).to(torch.bfloat16)
    keep_by_inputs(layer)
    assert layer.weight.is_contiguous()
