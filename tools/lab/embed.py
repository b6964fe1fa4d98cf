#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""embed.py OUT.cc INDEX.html STYLE.css SCRIPT.js...: the lab page as C++ constants.

The scripts are modules that import only from each other, given in an order in which each comes
after what it imports: without their import and export words they are one module.
"""

import re
import sys

STANDALONE_POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
                     "img-src data: blob:")


def bundle(paths):
    parts = []
    for path in paths:
        text = open(path, encoding="utf-8").read()
        text = re.sub(r"^import [^;]*;\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"^export (?=(?:async )?(?:function|class|const|let) )", "", text,
                      flags=re.MULTILINE)
        if re.search(r"^(?:import|export)\b", text, re.MULTILINE):
            sys.exit(f"embed.py: {path}: an import or export that this program does not know")
        parts.append(text)
    return "".join(parts)


def literal(text):
    """Pieces below any compiler's limit for the length of a literal."""
    data = text.encode()
    out = []
    for start in range(0, len(data), 60):
        piece = "".join(
            chr(byte) if 32 <= byte < 127 and byte not in b'"\\?' else f"\\{byte:03o}"
            for byte in data[start:start + 60])
        out.append(f'    "{piece}"')
    return "\n".join(out)


def main():
    out, index, style, *scripts = sys.argv[1:]
    page = open(index, encoding="utf-8").read()
    css = open(style, encoding="utf-8").read()
    script = bundle(scripts)
    if "</script" in script.lower() or "</style" in css.lower():
        sys.exit("embed.py: the end of a script or style inside of it")
    links = ('<link rel="stylesheet" href="style.css">',
             '<script type="module" src="app.js"></script>')
    for link in links:
        if page.count(link) != 1:
            sys.exit(f"embed.py: {index} must have once: {link}")
    standalone = page.replace(
        links[0], f'<meta http-equiv="Content-Security-Policy" content="{STANDALONE_POLICY}">\n'
        f"<style>\n{css}</style>")
    standalone = standalone.replace(
        links[1], '<script type="application/json" id="run">{"verbena_run":null}</script>\n'
        f'<script type="module">\n{script}</script>')
    constants = {"kLabPage": page, "kLabScript": script, "kLabStyle": css,
                 "kStandalonePage": standalone}
    with open(out, "w", encoding="utf-8") as file:
        file.write('#include "tools/lab/assets.h"\n\nnamespace verbena::tools {\n')
        for name, text in constants.items():
            file.write(f"\nconst std::string_view {name} =\n{literal(text)};\n")
        file.write("\n}  // namespace verbena::tools\n")


main()
