"""The scripts stay short: a new feature pays by a cut, or becomes a recipe."""

import ast
import io
import subprocess
import tokenize

import pytest
from conftest import ROOT, SCRIPTS
from helpers import MODULES

TOKENS = {"ppo": 3600, "ppo_continuous": 4000, "ppo_atari": 3650}
FLAGS = {"ppo": 35, "ppo_continuous": 38, "ppo_atari": 36}
# How many lines differ at most, of one script and another.
CHANGED = [("ppo", "ppo_continuous", 135), ("ppo", "ppo_atari", 255)]
CHANGED += [(name, f"variants/{name}_recurrent", 135) for name in SCRIPTS]
FUNCTION = 50  # lines, but for:
TRAIN = 165
DENSITY = 10.0  # tokens of a line with code: fuller lines are no gain

LAYOUT = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
    """The tokens of code: no comments, docstrings or layout, and an f-string counts as one."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    tokens, depth = [], 0  # from Python 3.12 on, an f-string's parts are tokens between two more
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        if depth == 0 and kind not in {*LAYOUT, "FSTRING_END"} and token.start not in docstrings:
            tokens.append(token)
        depth += kind == "FSTRING_START"
    return tokens


@pytest.mark.parametrize("name", SCRIPTS)
def test_size(name: str) -> None:
    """Flags, tokens, tokens of a line, and lines of each function."""
    source = (ROOT / f"{name}.py").read_text()
    tokens = code_tokens(source)
    assert max(map(len, source.splitlines())) <= 100
    assert len(MODULES[name].Args.__dataclass_fields__) <= FLAGS[name]
    assert len(tokens) <= TOKENS[name]
    assert len(tokens) / len({token.start[0] for token in tokens}) <= DENSITY
    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    for function in functions:
        limit = TRAIN if function.name == "train" else FUNCTION
        assert function.end_lineno - function.lineno < limit, function.name


@pytest.mark.parametrize(("base", "name", "limit"), CHANGED)
def test_difference(base: str, name: str, limit: int) -> None:
    """Whatever is the same stands the same: a diff shows what other actions or a memory change."""
    command = ["diff", ROOT / f"{base}.py", ROOT / f"{name}.py"]
    diff = subprocess.run(command, capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines() if line[0] in "<>"]
    assert 0 < len(changed) <= limit
