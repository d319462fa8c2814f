"""The documentation site: Sphinx over the Markdown pages of this folder. ``make docs`` builds it."""

from kvstore.distribution import VERSION

project = "kvstore"
version = release = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["examples", "data"]
highlight_language = "none"
html_theme = "furo"
html_title = "kvstore"
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # links to headings are spelled as GitHub spells them

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_custom_sections = ["Units", "Threads", "Cost"]
python_maximum_signature_line_length = 88

suppress_warnings = [
    "misc.highlighting_failure",  # output of the command line is shown as it is
]
