"""A lowered layer as a Python function, from the code that each rank of its stage would run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx, nn

from autopar.emit.opaque import OpaqueCall, drawn
from autopar.emit.program import Writer, identifiers
from autopar.emit.source import runtime
from autopar.emit.source.text import PaperGroups, Speaker
from autopar.errors import EmitError
from autopar.shard import collectives, kernels
from autopar.shard.program import Program
from autopar.trace.run import overload

TAKEN = frozenset((*runtime.__all__, "aten", "here", "layer", "torch", "values"))
"""Names that no value may have."""
KERNELS = {id(function): name for name, function in kernels.KERNELS.items()}


def function_text(
    name: str, about: str, program: Program, batch: int, training: bool, speaker: Speaker, device: torch.device
) -> str:
    """The function `name`, those of its recomputed regions before it. Raises EmitError on what can't be written."""
    writers = [
        Writer(program, batch, PaperGroups(speaker.sizes, place, device), training, lambda _: nn.Module(), None)
        for place in speaker.places
    ]
    modules = [writer.write() for writer in writers]
    return "\n\n\n".join([*_Function(name, about, modules, writers[0].nodes, speaker, training).texts()])


class _Function:
    """Writes one function from the graphs of all ranks, which differ in constants only."""

    def __init__(
        self,
        name: str,
        about: str,
        modules: Sequence[fx.GraphModule],
        values: dict[str, fx.Node],
        speaker: Speaker,
        training: bool,
    ) -> None:
        self.name, self.about, self.modules, self.speaker = name, about, modules, speaker
        self.training = training
        self.words = self._words(values)
        self.helpers: list[str] = []

    def _words(self, values: dict[str, fx.Node]) -> dict[fx.Node, str]:
        """A name for each node: that of the value in the program where it has one."""
        named: dict[fx.Node, str] = {}
        for value, node in values.items():
            named.setdefault(node, value)
        nodes = list(self.modules[0].graph.nodes)
        return dict(zip(nodes, identifiers([named.get(n, n.name) for n in nodes], TAKEN), strict=True))

    def texts(self) -> Iterator[str]:
        """The helpers, then the function."""
        nodes = list(zip(*(m.graph.nodes for m in self.modules), strict=True))
        inputs = [self.words[each[0]] for each in nodes if each[0].op == "placeholder"]
        last = self._last_uses([each[0] for each in nodes])
        lines = []
        for each in nodes:
            if line := self._line(each):
                gone = [self.words[n] for n in last.get(each[0], ()) if n.op not in ("placeholder", "get_attr")]
                lines.append(f"    {line}{'; del ' + ', '.join(gone) if gone else ''}")
        yield from self.helpers
        yield "\n".join([f"def {self.name}({', '.join(inputs)}):", f'    """{self.about}"""', *lines])

    def _last_uses(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """By node, the values that nothing after it reads."""
        found: dict[fx.Node, list[fx.Node]] = {}
        order = {node: i for i, node in enumerate(nodes)}
        for node in nodes:
            if node.users:
                user = max(node.users, key=lambda n: order[n])
                if user.op != "output":
                    found.setdefault(user, []).append(node)
        return found

    def _line(self, each: Sequence[fx.Node]) -> str:
        node = each[0]
        if node.op in ("placeholder", "get_attr"):
            return ""
        if node.op == "output":
            return f"return {self._value([n.args[0] for n in each])}"
        return f"{self.words[node]} = {self._call(each)}"

    def _call(self, each: Sequence[fx.Node]) -> str:
        node = each[0]
        if node.op == "call_module":
            return self._call_of_module(each)
        if node.target is collectives.relayout:
            source, *_ = node.args
            moves = (self.speaker.moves([n.args[i] for n in each]) for i in (1, 2))  # type: ignore[misc]
            return f"relayout({self._value([source])}, {', '.join(moves)})"
        if getattr(node.target, "__name__", "") == "getitem":
            return f"{self._value([node.args[0]])}[{node.args[1]}]"
        arguments = [self._argument(each, i) for i in range(len(node.args))]
        arguments += [f"{k}={self._value([n.kwargs[k] for n in each])}" for k in node.kwargs]
        return f"{_called(node)}({', '.join(arguments)})"

    def _call_of_module(self, each: Sequence[fx.Node]) -> str:
        node = each[0]
        called = [m.get_submodule(str(node.target)) for m in self.modules]
        arguments = [self._argument(each, i) for i in range(len(node.args))]
        name = f"{self.name}_{node.target}"
        if isinstance(called[0], OpaqueCall):
            whole = called[0]
            self.helpers.append(f"{name} = Submodule({whole.path!r}, {whole.form!r}, {self.training})")
            return f"{name}({', '.join(arguments)})"
        codes = [m.code for m in called]
        about = f"Runs again in the backward pass of {self.name}."
        helper = _Function(name, about, codes, {}, self.speaker, self.training)  # type: ignore[arg-type]
        self.helpers += helper.texts()
        kind = "made_again" if called[0].light else "recomputed"
        return f"{kind}({', '.join([name, *arguments])})"

    def _argument(self, each: Sequence[fx.Node], index: int) -> str:
        return self._value([n.args[index] for n in each])

    def _value(self, values: Sequence[object]) -> str:
        first = values[0]
        if isinstance(first, fx.Node) and first.op == "get_attr":
            return self.speaker.value([getattr(m, str(first.target)) for m in self.modules], self.words.__getitem__)
        return self.speaker.value(values, self.words.__getitem__)


def _called(node: fx.Node) -> str:
    """How a function of the code is written."""
    if id(node.target) in KERNELS:
        return f"kernels.{node.target.__name__}"  # type: ignore[union-attr]
    if node.target is drawn:
        return "drawn"
    text = str(node.target)
    if text.startswith("aten."):
        return text
    if text.count(".") == 2 and overload(text) is node.target:
        return f"torch.ops.{text}"
    raise EmitError(f"{text}: a call that has no source. Run this plan with autopar.optimize.")
