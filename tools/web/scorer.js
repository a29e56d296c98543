/* How the search weighs what it finds: Sphinx's own weights, with pages of the book before lists of signatures. */
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    page === "changelog" || (page.startsWith("api/") && !anchor) ? score / 4 : score,
  objNameMatch: 11, objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
