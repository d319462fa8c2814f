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

MADE_BY_METHODS = {
    "kvstore.BlockStore",
    "kvstore.Entries",
    "kvstore.Job",
    "kvstore.Match",
    "kvstore.PinnedPages",
    "kvstore.PrefixCache",
    "kvstore.Scope",
    "kvstore.Stored",
}
"""Classes that callers get from a method: their constructors are internal and are not shown."""


def without_constructor(_app, _what, name, _object, _options, signature, returned):
    """Hide the signature of a class that callers do not construct."""
    return ("", returned) if name in MADE_BY_METHODS else (signature, returned)


def setup(app):
    """Connect the function above. Called by Sphinx."""
    app.connect("autodoc-process-signature", without_constructor)
