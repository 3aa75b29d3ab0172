"""Settings of the site, for Sphinx: `bash run.sh docs` builds it."""

import importlib.metadata
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Help pages and tables are as wide as this, whatever terminal the build runs in.
os.environ['COLUMNS'] = '80'

project = 'jaxpruner'
author = 'The jaxpruner developers'
copyright = author
version = release = importlib.metadata.version('jaxpruner')

extensions = [
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'myst_nb',
    'sphinx_copybutton',
    'docs.extensions.blocks_of_code',
    'docs.extensions.made_blocks',
    'docs.extensions.notebook_outputs',
    'docs.extensions.other_libraries',
    'docs.extensions.plain_markdown',
]
root_doc = 'index'
exclude_patterns = ['conf.py', 'extensions']
nitpicky = False
default_role = 'py:obj'  # a name between single backquotes leads to its entry, if it has one

# Docstrings.
autodoc_inherit_docstrings = False
autodoc_member_order = 'bysource'
autodoc_typehints_format = 'short'
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [('Keys', 'params_style')]
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = 'hide'

# Pages.
myst_enable_extensions = ['colon_fence', 'attrs_block', 'deflist', 'dollarmath']
myst_heading_anchors = 4
nb_custom_formats = {'.py': ['jupytext.reads', {'fmt': 'py:percent'}]}
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = 'error'
nb_merge_streams = True

html_theme = 'sphinx_book_theme'
html_title = f'jaxpruner {version}'
html_static_path = ['_static']
html_css_files = ['site.css']
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    'use_download_button': False,  # pages have no sources beside them; notebooks offer themselves
    'use_fullscreen_button': False,
    'show_toc_level': 2,
    'home_page_in_toc': True,
    'navbar_persistent': [],  # search stands above the list of pages
    'pygments_light_style': 'tango',
}
copybutton_prompt_text = r'>>> |\.\.\. |\$ '
copybutton_prompt_is_regexp = True
