"""How Sphinx makes the site of the pages in docs/: `make docs`. Decision 026 says why it is Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # the extensions beside this file; memstore, of this checkout

import memstore  # noqa: E402

project = "memstore"
author = "memstore contributors"
copyright = author
release = version = memstore.__version__

root_doc = "index"
exclude_patterns = ["site", "notebooks/README.md"]
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # Args:, Returns:, Raises: of our docstrings
    "myst_nb",  # Markdown, by myst-parser, and notebooks
    "sphinx_copybutton",
    "sphinx_design",  # the cards of the home page
    "docstrings",  # this one and the next two are beside this file
    "outside",
    "signatures",
]

# --- Markdown: what GitHub shows, and no directives, so that pages read well in both places ---------------------------
myst_heading_anchors = 4  # named as GitHub names them
nb_execution_mode = "force"  # the notebooks run each time, so what the site shows is what they print today
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds a cell
nb_execution_in_temp = True
highlight_language = "none"  # a fence without a language
copybutton_prompt_text = "$ "

# --- the reference, from the docstrings -------------------------------------------------------------------------------
default_role = "py:obj"  # `Store.put` in a docstring links there, if there is such a name
# They are in environments of their own; nothing of them is shown.
autodoc_mock_imports = ["accelerate", "lightning", "torchrl", "torchtitan", "transformers", "vllm"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autoclass_content = "both"  # the docstrings of a class and of its __init__
maximum_signature_line_length = 90
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
add_module_names = False

# --- how it looks -----------------------------------------------------------------------------------------------------
html_theme = "furo"
html_title = "memstore"
html_static_path = ["static"]
html_css_files = ["memstore.css"]
html_search_scorer = str(HERE / "search.js")  # which pages come first
html_copy_source = False
html_domain_indices = False  # the index of Python modules would have those of automodule alone
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
