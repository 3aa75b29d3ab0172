"""Notebooks that the build runs show what they promise: pictures, and nothing that is warned of.

Cells that fail or write to stderr fail the build by `nb_execution_raise_on_error` and `nb_output_stderr` in `conf.py`.
"""

from typing import Any

FEWEST_PICTURES = 3


def check_pictures(app: Any, doctree: Any, docname: str) -> None:
    """Warns of a notebook with fewer pictures, which fails the build."""
    from docutils import nodes  # tests read extensions without Sphinx
    from sphinx.util import logging

    if app.env.doc2path(docname, base=False).suffix != '.py':
        return
    number = len(list(doctree.findall(nodes.image)))
    if number < FEWEST_PICTURES:
        logging.getLogger(__name__).warning(
            f'the cells of {docname} made {number} pictures, and {FEWEST_PICTURES} are wanted',
            location=docname,
        )


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect('doctree-resolved', check_pictures)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
