"""The documentation site: `make docs` builds it into build/docs, without the network.

Sphinx and MyST, as jax, flax and optax have it: pages are Markdown that reads as well where there
is no site, and the reference is read from docstrings. The theme is furo, which brings its fonts and
scripts along.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

import pipeline  # noqa: E402

project = "shardpipe"
author = "the authors of shardpipe"
project_copyright = "the authors of shardpipe, Apache-2.0"
version = release = pipeline.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "shardpipe_site",
]
exclude_patterns = ["_ext", "_static", "**.ipynb_checkpoints"]
nitpicky = True
# Types of other packages have no page here; what they are stands in the signature.
nitpick_ignore_regex = [("py:.*", "(?s).*")]

# --- pages ---

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
# A notebook is kept with what it printed: tests run it, a build does not.
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]

# --- the reference ---

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
# In docstrings `name` is code, and a link where the name has an entry.
default_role = "py:obj"

# --- how it looks ---

html_theme = "furo"
html_title = "shardpipe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["timetables.js"]
html_search_scorer = str(ROOT / "docs" / "_ext" / "scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5c9e",
        "color-brand-content": "#0b5c9e",
        "font-stack": 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif',
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4f0",
        "color-brand-content": "#7cc4f0",
    },
}
