"""The files of the page; `auth` lets browsers ask for the key when they open one of them."""

#: Path -> file and its type.
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
    "/dashboard/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/dashboard/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/dashboard/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
}
