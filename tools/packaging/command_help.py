# SPDX-License-Identifier: Apache-2.0
"""The command lines of verbena and verbenad as data, read from their own --help.

Man pages and completions are made of this at packaging time, so they say what the programs say.
The layout is CLI11's: text, "Usage:", titled lists with names from column 2 and descriptions from
column 30 (on the next line if the name is too long), text.
"""

import dataclasses
import re
import subprocess

DESCRIPTION_COLUMN = 30


@dataclasses.dataclass
class Option:
    names: list  # ["-h", "--help"]; of a positional: ["what"]
    value: str = ""  # "TEXT", "INT", ... ; "" for a flag
    choices: list = dataclasses.field(default_factory=list)
    limits: str = ""  # "in [1 - 64]", "POSITIVE"
    required: bool = False
    many: bool = False
    description: str = ""


@dataclasses.dataclass
class Command:
    words: list  # ["verbena", "fault", "add"]
    summary: str = ""  # the text above "Usage:"
    usage: str = ""
    options: list = dataclasses.field(default_factory=list)
    positionals: list = dataclasses.field(default_factory=list)
    commands: list = dataclasses.field(default_factory=list)  # of Command
    footer: str = ""

    def walk(self):
        yield self
        for command in self.commands:
            yield from command.walk()


def _entries(lines):
    """(name, description) of each item of a titled list."""
    i = 0
    while i < len(lines):
        if i + 1 < len(lines) and lines[i + 1].startswith(" " * DESCRIPTION_COLUMN):
            yield lines[i].strip(), lines[i + 1].strip()
            i += 2
        else:
            yield lines[i][:DESCRIPTION_COLUMN].strip(), lines[i][DESCRIPTION_COLUMN:].strip()
            i += 1


def _option(name, description):
    words = name.split()
    option = Option(names=words[0].split(","), description=description)
    rest = words[1:]
    if rest and rest[-1] == "REQUIRED":
        option.required = True
        rest.pop()
    if rest and rest[-1] == "...":
        option.many = True
        rest.pop()
    if rest:
        option.value, _, limits = " ".join(rest).partition(":")
        choices = re.fullmatch(r"\{(.*)\}", limits)
        if choices:
            option.choices = choices.group(1).split(",")
        else:
            # "INT:INT in [1 - 64]" says the type twice.
            option.limits = limits.removeprefix(option.value).strip()
    return option


def parse(words, text):
    """The Command of one --help text; its sub-commands have names and summaries only."""
    command = Command(words=words)
    lines = text.rstrip().splitlines()
    usage = next(i for i, line in enumerate(lines) if line.startswith("Usage: "))
    command.summary = "\n".join(lines[:usage]).strip()
    command.usage = lines[usage].removeprefix("Usage: ")
    i = usage + 1
    while i < len(lines):
        title = re.fullmatch(r"(Options|Positionals|Subcommands):", lines[i])
        if not lines[i]:
            i += 1
            continue
        if not title:
            command.footer = "\n".join(lines[i:])
            break
        end = i + 1
        while end < len(lines) and lines[end].startswith("  "):
            end += 1
        for name, description in _entries(lines[i + 1:end]):
            if title.group(1) == "Options":
                command.options.append(_option(name, description))
            elif title.group(1) == "Positionals":
                command.positionals.append(_option(name, description))
            else:
                command.commands.append(Command(words + [name], description))
        i = end
    return command


def read(program, words):
    """The whole tree of commands of the program at path `program`."""
    done = subprocess.run([program, *words[1:], "--help"], stdin=subprocess.DEVNULL, timeout=30,
                          stdout=subprocess.PIPE, text=True, check=True)
    command = parse(words, done.stdout)
    if not command.options:
        raise ValueError(f"{' '.join(words)} --help: no options found")
    command.commands = [read(program, sub.words) for sub in command.commands]
    return command


def version(program):
    """"0.1.0" of `PROGRAM --version`."""
    done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, timeout=30,
                          stdout=subprocess.PIPE, text=True, check=True)
    return re.match(r"\S+ (\d[\w.+~]*)", done.stdout).group(1)
