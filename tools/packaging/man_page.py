# SPDX-License-Identifier: Apache-2.0
"""man pages of verbena and verbenad, from their own --help (command_help.py) and the sections
below that --help has no place for."""

import re

_ENVIRONMENT = {
    "VERBENA_NAME": "Instance, where --name is not given.",
    "VERBENA_SOCKET": "Socket of the daemon to use, before all others.",
    "XDG_RUNTIME_DIR": "If it is a folder of this user, the run folder lies in it.",
}

_FILES = {
    "$XDG_RUNTIME_DIR/verbena, else /tmp/verbena-UID":
        "Run folder of a user's daemons: NAME.sock, NAME.pid, NAME.log.",
    "/run/verbena": "Run folder of system-wide daemons (--system).",
}

_DAEMON_ENVIRONMENT = {
    **{name: _ENVIRONMENT[name] for name in ("VERBENA_NAME", "XDG_RUNTIME_DIR")},
    "NOTIFY_SOCKET":
        "With --foreground: a service manager's socket, told when the devices are ready and "
        "when the daemon ends (systemd's Type=notify).",
}

_CONFIGURATION = """\
The file that --config names is TOML; what the command line says wins.

  nics = 2
  host = 0             # default addresses are 127.88.HOST.(n+1)

  [verbena0]
  addresses = ["10.0.0.1", "fd00::1"]    # GID indices 1, 2, ..."""

_SIGNALS = """\
SIGTERM and SIGINT end the daemon: programs that still use its devices get \
IBV_EVENT_DEVICE_FATAL, their outstanding work requests flush, further calls fail with EIO. \
SIGHUP is ignored."""


def escape(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.M)


def _macro(name, text):
    return f'.{name} "{escape(text)}"'.replace('\\&', '')


def _text(text):
    """Paragraphs; indented lines stay as they are."""
    out, code = [], False
    for line in text.splitlines():
        if line.startswith("  "):
            if not code:
                out += [".PP", ".RS 4", ".nf"]
                code = True
            out.append(escape(line[2:]))
            continue
        if code:
            out += [".fi", ".RE"]
            code = False
        if not line:
            out.append(".PP")
        elif line.endswith(":") and out and not out[-1].startswith("."):
            out += [".PP", escape(line)]
        else:
            out.append(escape(line))
    if code:
        out += [".fi", ".RE"]
    return out


def _signature(option):
    value = option.value if option.names[0].startswith("-") else ""
    if option.choices:
        value = "|".join(option.choices)
    text = ", ".join(f"\\fB{escape(name)}\\fR" for name in option.names)
    if value:
        text += f" \\fI{escape(value)}\\fR"
    if option.many:
        text += " ..."
    return text


def _options(options):
    out = []
    for option in options:
        limits = f" ({option.limits})" if option.limits.startswith("in ") else ""
        description = option.description or "(no description)"
        out += [".TP", _signature(option), escape(description + limits)]
    return out


def _definitions(table):
    out = []
    for name, text in table.items():
        out += [".TP", f".B {escape(name)}", escape(text)]
    return out


def _head(command, section, version, date, what):
    name = command.words[0]
    return [
        f'.TH {name.upper()} {section} "{date}" "Verbena {version}" "Verbena"',
        ".SH NAME", f"{name} \\- {escape(what)}",
    ]


def _interesting(options):
    return [option for option in options if "--help" not in option.names]


def verbena_page(command, version, date):
    out = _head(command, 1, version, date, "start, observe and steer a software RDMA NIC")
    out += [".SH SYNOPSIS", ".nf"]
    for each in command.walk():
        if not each.commands:
            words = " ".join(each.words)
            arguments = each.usage.removeprefix(words)
            out.append(f"\\fB{escape(words)}\\fR{escape(arguments)}")
    out += [".fi", ".SH DESCRIPTION", *_text(command.summary), ".PP", *_text(command.footer)]
    out += [".SH COMMANDS"]
    for each in command.walk():
        if each is command:
            continue
        out += [_macro("SS", " ".join(each.words) + each.usage.removeprefix(" ".join(each.words)))]
        out += [*_text(each.summary + ".")]
        out += _options(each.positionals) + _options(_interesting(each.options))
        parent = next(c for c in command.walk() if each in c.commands)
        if each.footer and each.footer != parent.footer:
            out += [".PP", *_text(each.footer)]
    out += [".SH ENVIRONMENT", *_definitions(_ENVIRONMENT)]
    out += [".SH FILES", *_definitions(_FILES)]
    out += [".SH SEE ALSO",
            "\\fBverbenad\\fR(8), \\fBibv_devinfo\\fR(1), \\fBibv_rc_pingpong\\fR(1)"]
    return "\n".join(out) + "\n"


def verbenad_page(command, version, date):
    out = _head(command, 8, version, date, "the daemon that plays software RDMA NICs")
    out += [".SH SYNOPSIS", f"\\fB{command.words[0]}\\fR [OPTIONS]"]
    out += [".SH DESCRIPTION", *_text(command.summary), ".SH OPTIONS"]
    out += _options(command.options)
    if command.footer:
        out += [".PP", *_text(command.footer)]
    out += [".SH CONFIGURATION", *_text(_CONFIGURATION)]
    out += [".SH SIGNALS", *_text(_SIGNALS)]
    out += [".SH EXIT STATUS",
            "0 after a clean end, or when the daemon is ready in the background; 1 otherwise, with "
            "one line on stderr that says why."]
    out += [".SH ENVIRONMENT", *_definitions(_DAEMON_ENVIRONMENT)]
    out += [".SH FILES", *_definitions(_FILES), ".SH SEE ALSO", "\\fBverbena\\fR(1)"]
    return "\n".join(out) + "\n"
