// Order of search results: first a page with the whole query in its title, then one with it among its
// key words (`<!-- search: -->`), history last.
var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    const query = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase();
    const guide = kind !== "object" && !page.startsWith("reference/");
    const named = guide && title.toLowerCase().includes(query);
    const late = /^(changelog|contributing|architecture)$/.test(page);
    return score + (named ? 100 : 0) - (late ? 50 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
