# SPDX-License-Identifier: Apache-2.0
"""Completions of bash, zsh and fish for verbena and verbenad, from their own --help
(command_help.py)."""

import shlex

# Values that only the running machine knows: option or positional -> kind.
_KINDS = {"--name": "instance", "--dev": "device", "--config": "file", "file": "file",
          "id": "rule", "COMMAND": "command"}


def _choices(option):
    return _KINDS.get(option.names[-1]) or " ".join(option.choices)


def _node(command):
    """Words of one command: options, what follows options with a value, positionals."""
    options = [name for option in command.options for name in option.names]
    values = {name: _choices(option) for option in command.options if option.value
              for name in option.names}
    positional = _choices(command.positionals[0]) if command.positionals else ""
    return options, values, positional, [sub.words[-1] for sub in command.commands]


_BASH_HEAD = """\
# bash completion of verbena and verbenad. Made from their --help; do not edit.

_verbena_instances() {
    local folder file
    for folder in "${XDG_RUNTIME_DIR:-/nonexistent}/verbena" "/tmp/verbena-$EUID" /run/verbena; do
        for file in "$folder"/*.sock; do
            [[ -S $file ]] && file=${file##*/} && printf '%s\\n' "${file%.sock}"
        done
    done
}

_verbena_devices() {
    verbena status --json 2>/dev/null </dev/null | sed -n 's/.*"device": *"\\([^"]*\\)".*/\\1/p'
}

_verbena_rules() {
    verbena fault list --json 2>/dev/null </dev/null | sed -n 's/.*"id": *\\([0-9]*\\).*/\\1/p'
}

# _verbena_reply KIND-OR-WORDS CURRENT
_verbena_reply() {
    case $1 in
        instance) mapfile -t COMPREPLY < <(compgen -W "$(_verbena_instances)" -- "$2") ;;
        device) mapfile -t COMPREPLY < <(compgen -W "$(_verbena_devices)" -- "$2") ;;
        rule) mapfile -t COMPREPLY < <(compgen -W "$(_verbena_rules)" -- "$2") ;;
        file)
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$2")
            ;;
        command) mapfile -t COMPREPLY < <(compgen -c -- "$2") ;;
        *) mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2") ;;
    esac
}
"""


def _bash_function(root):
    name = f"_{root.words[0]}_complete"
    tables = []
    for command in root.walk():
        key = " ".join(command.words)
        options, values, positional, commands = _node(command)
        tables.append((key, options, values, positional, commands))
    out = [f"{name}() {{",
           "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}",
           f"    local at={shlex.quote(root.words[0])} word i",
           "    COMPREPLY=()",
           "    for ((i = 1; i < COMP_CWORD; ++i)); do",
           "        word=${COMP_WORDS[i]}",
           '        case "$at:$word" in']
    for command in root.walk():
        for sub in command.commands:
            key = f"{' '.join(command.words)}:{sub.words[-1]}"
            out.append(f"            {shlex.quote(key)}) at={shlex.quote(' '.join(sub.words))} ;;")
    # `run`: behind the first word that is no option of ours another program's words begin.
    takes = {name for command in root.walk() for option in command.options if option.value
             for name in option.names}
    if any(command.words[-1] == "run" for command in root.commands):
        out += ["            'verbena run:--')",
                "                _verbena_inner $((i + 1))",
                "                return",
                "                ;;",
                "            'verbena run:'*)",
                f"                if [[ $word != -* && ${{COMP_WORDS[i - 1]}} != "
                f"@({'|'.join(sorted(takes))}) ]]; then",
                "                    _verbena_inner $i",
                "                    return",
                "                fi",
                "                ;;"]
    out += ["        esac", "    done", '    case "$at:$previous" in']
    for key, _, values, _, _ in tables:
        for option, choices in values.items():
            pattern = shlex.quote(f"{key}:{option}")
            reply = f'_verbena_reply {shlex.quote(choices)} "$current"' if choices else ":"
            out.append(f"        {pattern}) {reply}; return ;;")
    out += ["    esac", "    case $at in"]
    for key, options, _, positional, commands in tables:
        words = " ".join(commands)
        out.append(f"        {shlex.quote(key)})")
        out.append(f"            if [[ $current == -* ]]; then "
                   f"_verbena_reply {shlex.quote(' '.join(options))} \"$current\"")
        out.append(f"            else _verbena_reply {shlex.quote(words or positional)} "
                   '"$current"; fi')
        out.append("            ;;")
    out += ["    esac", "}", f"complete -F {name} {root.words[0]}", ""]
    return out


_BASH_INNER = """\
# _verbena_inner INDEX: the words from there on are another program's.
_verbena_inner() {
    if declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    elif ((COMP_CWORD == $1)); then
        mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
"""


def bash(*roots):
    parts = [_BASH_HEAD, _BASH_INNER]
    parts += ["\n".join(_bash_function(root)) for root in roots]
    return "\n".join(parts)


_FISH_VALUES = {
    "instance": "(for f in $XDG_RUNTIME_DIR/verbena/*.sock /run/verbena/*.sock; "
                "basename $f .sock; end)",
    "device": "(verbena status --json 2>/dev/null | string match -rg '\"device\": *\"([^\"]+)\"')",
    "rule": "(verbena fault list --json 2>/dev/null | string match -rg '\"id\": *(\\d+)')",
}


def _fish_quote(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_condition(root, command):
    if command is root:
        if not root.commands:
            return ""
        return "__fish_use_subcommand"
    tests = [f"__fish_seen_subcommand_from {word}" for word in command.words[1:]]
    if command.commands:
        subs = " ".join(sub.words[-1] for sub in command.commands)
        tests.append(f"not __fish_seen_subcommand_from {subs}")
    return "; and ".join(tests)


def fish(root):
    out = [f"# fish completion of {root.words[0]}. Made from its --help; do not edit."]
    for command in root.walk():
        condition = _fish_condition(root, command)
        head = f"complete -c {root.words[0]}"
        if condition:
            head += f" -n {_fish_quote(condition)}"
        for sub in command.commands:
            summary = sub.summary.splitlines()[0]
            out.append(f"{head} -f -a {sub.words[-1]} -d {_fish_quote(summary)}")
        for option in command.options:
            line = head
            for name in option.names:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            kind = _choices(option)
            if option.value:
                line += " -r" if kind == "file" else " -x"
                if kind in _FISH_VALUES or option.choices:
                    line += f" -a {_fish_quote(_FISH_VALUES.get(kind, kind))}"
            else:
                line += " -f"
            out.append(f"{line} -d {_fish_quote(option.description)}")
        for positional in command.positionals[:1]:
            kind = _choices(positional)
            if kind == "command":
                out.append(f"{head} -x -a '(__fish_complete_subcommand --fcs-skip=2)'")
            elif kind in _FISH_VALUES or positional.choices:
                out.append(f"{head} -f -a {_fish_quote(_FISH_VALUES.get(kind, kind))}")
    return "\n".join(out) + "\n"


_ZSH_VALUES = {
    "instance": "_verbena_instances",
    "device": "_verbena_devices",
    "rule": "_verbena_rules",
    "file": "_files",
}

_ZSH_HEAD = """\
_verbena_instances() {
    local -a found
    found=($XDG_RUNTIME_DIR/verbena/*.sock(N=:t:r) /tmp/verbena-$EUID/*.sock(N=:t:r)
           /run/verbena/*.sock(N=:t:r))
    compadd -a found
}

_verbena_devices() {
    compadd -- ${(f)"$(verbena status --json 2>/dev/null </dev/null |
        sed -n 's/.*"device": *"\\([^"]*\\)".*/\\1/p')"}
}

_verbena_rules() {
    compadd -- ${(f)"$(verbena fault list --json 2>/dev/null </dev/null |
        sed -n 's/.*"id": *\\([0-9]*\\).*/\\1/p')"}
}
"""


def _zsh_text(text):
    """In a description between [ ] of _arguments."""
    for character in "\\[]:":
        text = text.replace(character, "\\" + character)
    return text


def _zsh_value(option):
    kind = _choices(option)
    if kind in _ZSH_VALUES:
        return _ZSH_VALUES[kind]
    return f"({kind})" if kind else " "


def _zsh_runner(command):
    """Of a command that takes another program: behind its own options that one's words begin."""
    if not command.positionals or _choices(command.positionals[0]) != "command":
        return []
    takes = "|".join(name for o in command.options if o.value for name in o.names)
    return [f"    if [[ $words[2] == {command.words[-1]} ]]; then",
            "        integer i=3",
            "        while (( i < CURRENT )) && [[ $words[i] == -?* && $words[i] != -- ]]; do",
            f"            [[ $words[i] == ({takes}) ]] && (( i++ ))",
            "            (( i++ ))",
            "        done",
            "        [[ $words[i] == -- ]] && (( i < CURRENT )) && (( i++ ))",
            "        if (( i <= CURRENT )) && [[ $words[i] != -* ]]; then",
            "            shift $(( i - 1 )) words",
            "            (( CURRENT -= i - 1 ))",
            "            _normal -p verbena",
            "            return",
            "        fi",
            "    fi"]


def _zsh_function(command):
    name = "_" + "_".join(command.words)
    arguments, body = [], []
    before = [line for sub in command.commands for line in _zsh_runner(sub)]
    for option in command.options:
        value = f":{option.value.lower()}:{_zsh_value(option)}" if option.value else ""
        excluded = f"({' '.join(option.names)})" if len(option.names) > 1 else ""
        for each in option.names:
            arguments.append(f"{excluded}{each}[{_zsh_text(option.description)}]{value}")
    if command.commands:
        arguments += ["1:command:->command", "*::argument:->argument"]
        commands = " ".join(
            shlex.quote(f"{sub.words[-1]}:{_zsh_text(sub.summary.splitlines()[0])}")
            for sub in command.commands)
        body = ["    case $state in",
                "        command)",
                f"            choices=({commands})",
                "            _describe command choices",
                "            ;;",
                "        argument)",
                f"            (( $+functions[{name}_$line[1]] )) && {name}_$line[1]",
                "            ;;",
                "    esac"]
    elif command.positionals:
        option = command.positionals[0]
        if _choices(option) != "command":
            arguments.append(f"1:{option.names[0]}:{_zsh_value(option)}")
    out = [f"{name}() {{", "    local state line", "    local -a choices",
           "    typeset -A opt_args", *before,
           "    _arguments -C -s \\"]
    out += [f"        {shlex.quote(argument)} \\" for argument in arguments]
    out[-1] = out[-1].removesuffix(" \\")
    return "\n".join(out + body + ["}", ""])


def zsh(*roots):
    names = " ".join(root.words[0] for root in roots)
    parts = [f"#compdef {names}", "# Made from their --help; do not edit.", "", _ZSH_HEAD]
    parts += [_zsh_function(command) for root in roots for command in root.walk()]
    return "\n".join(parts) + '\n_$service "$@"\n'
