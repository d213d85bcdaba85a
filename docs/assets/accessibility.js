// The theme leaves the search dialog without a name, and the tables that it makes scrollable without keyboard access.
document.querySelector(".md-search").setAttribute("aria-label", "Search")

const makeFocusable = () =>
  document.querySelectorAll(".md-typeset__scrollwrap").forEach(element => {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0
  })
new MutationObserver(makeFocusable).observe(document.querySelector("article"), { childList: true, subtree: true })
addEventListener("load", makeFocusable)
addEventListener("resize", makeFocusable)
