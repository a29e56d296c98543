"""Sphinx's settings of the site that `make docs` builds; `tools/docs.py` writes its sources."""

project = "Chunk-GRPO"
author = "The Chunk-GRPO authors"
copyright = "the Chunk-GRPO authors, Apache License 2.0"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # the kept outputs are shown
nb_ipywidgets_js = {}  # no page carries the state of a widget, and nothing is fetched
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "fieldlist", "colon_fence"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["myst.header"]  # findings step from # to ###
source_suffix = {".ipynb": "myst-nb", ".md": "myst-nb"}
exclude_patterns = ["_static", "_templates"]
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"
pygments_style = "a11y-high-contrast-light"

html_theme = "sphinx_book_theme"
html_title = "Chunk-GRPO"
html_static_path = ["_static"]
templates_path = ["_templates"]  # no index of Sphinx on every page, and the page of the search
html_favicon = "_static/chunks.svg"
html_css_files = ["book.css", "interactive.css"]
html_js_files = ["book.js", ("interactive.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_permalinks_icon = "#"
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "max_navbar_depth": 2,
    "show_toc_level": 2,
    "search_bar_text": "Search the book",
    "secondary_sidebar_items": ["page-toc.html"],
}

mathjax_path = (
    "mathjax/tex-chtml-full.js"  # from the package django-static-mathjax, Apache License 2.0
)
mathjax3_config = {"chtml": {"displayAlign": "center"}, "options": {"enableMenu": False}}
