"""Make data/jargon.txt: a public-domain haystack, out of the Jargon File 4.4.7 as Debian's jargon-text package ships it.

    python tools/make_jargon.py /usr/share/doc/jargon-text/jargon.txt.gz

Paragraphs of prose only: tables, headings and every paragraph with three digits in a row are left out, so that nothing
in the haystack can be mistaken for a planted code.
"""

import gzip
import re
import sys
from pathlib import Path

KEEP_CHARACTERS = 260_000


def paragraphs(text):
    """Runs of lines, joined; the file indents by three spaces and separates by blank lines."""
    for block in re.split(r"\n\s*\n", text):
        yield " ".join(block.split())


def is_prose(paragraph):
    """Long enough to be a paragraph, ends like a sentence, and has neither box-drawing characters nor numbers."""
    return len(paragraph) > 200 and paragraph[-1] in ".!?”)" and not re.search(r"\d{3}|[\u2500-\u257f]|http|@", paragraph)


def main(source):
    text = gzip.open(source, "rt", encoding="utf-8").read()
    kept, size = [], 0
    for paragraph in filter(is_prose, paragraphs(text)):
        kept.append(paragraph)
        size += len(paragraph)
        if size > KEEP_CHARACTERS:
            break
    (Path(__file__).resolve().parent.parent / "data" / "jargon.txt").write_text("\n\n".join(kept) + "\n", encoding="utf-8")
    print(f"{len(kept)} paragraphs, {size:,} characters")


if __name__ == "__main__":
    main(sys.argv[1])
