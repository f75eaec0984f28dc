// What the search puts first: `html_search_scorer` in conf.py. Sphinx scores a page 15 if the words stand in one of its
// headings and 5 if they stand elsewhere, so most results are equal and would follow the alphabet.

// Added for a page, or for all pages of a folder; nothing for what isn't named here.
const PLACES = {
  "troubleshooting": 4,
  "quickstart": 3,
  "concepts": 2, "command-line": 2, "api/store": 2,
  "recipes": 1,
  "api/": -1,
  "api/aio": -10,  // its methods have the names of those of Store
  // For contributors: below whatever a reader's page says.
  "decisions/": -30, "project/": -30, "internals": -30, "testing": -30, "releasing": -30, "dependencies": -30,
};
// For a page whose title begins with what was asked, or has it: "replay" is for "Replay buffers" first.
const BEGINS = 3, CONTAINS = 2;
const SECTION = 1;  // for a heading that is nearly what was asked: it stands before its page

function scoreOf([page, title, anchor, description, score, file, kind]) {
  const asked = (new URLSearchParams(window.location.search).get("q") ?? "").trim().toLowerCase();
  const place = title.toLowerCase().indexOf(asked);
  const named = kind !== "text" || place < 0 ? 0 : place > 0 ? CONTAINS : BEGINS;
  const folder = page.slice(0, page.indexOf("/") + 1);
  return score + named + (kind === "title" && anchor ? SECTION : 0) + (PLACES[page] ?? PLACES[folder] ?? 0);
}

var Scorer = {
  score: scoreOf,
  // The rest is what Sphinx has by itself; it wants all or nothing.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
