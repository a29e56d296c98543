// The search of the book: sections ranked by BM25 over title, heading, text and code, with the synonyms of synonyms.json.
// Pages come before entries of the API, unless the query is the exact name of an entry.
(() => {
  const WEIGHTS = { title: 4, name: 5, text: 1, code: 0.25 };
  const LEAD = 2.5;  // a word in the introduction of a page counts as so many
  const KIND = [  // how much a page counts that lists, repeats or records
    [/^(\d\d_\w+|reports)\/index\.html$/, 0.6], [/^changelog\.html$/, 0.25], [/^reports\//, 0.4], [/^index\.html$/, 0.8],
  ];
  const MEANT = /_|\.|[a-z][A-Z]/;  // what only a name of the code contains
  const KEPT = new Set(["own", "out", "same", "before", "after", "more", "off"]);  // these carry meaning here
  const ASKED = new Set(["use", "make", "get", "want", "need", "work", "possible", "much", "many", "mean", "means", "way", "take"]);

  const NUMBERS = /^[\d\s.,()]+(to [\d\s.,()]+)?:?/;  // of a part or an equation, before a heading

  const stemmer = new Stemmer();
  const stems = new Map();
  function stem(word) {
    if (!stems.has(word)) stems.set(word, stemmer.stemWord(word));
    return stems.get(word);
  }
  const unmarked = new Set([...stopwords].filter((word) => !KEPT.has(word)).map(stem));
  const words = (text) => text.match(/[\p{L}\p{N}_]+(?:[.-][\p{L}\p{N}_]+)*/gu) || [];
  const known = new Map();
  // The terms that a word is found by: `clip_range` and `FLUX.2` also by their parts.
  function terms(word) {
    if (!known.has(word)) {
      const parts = word.split(/[_.-]|(?<=[a-z])(?=[A-Z])/).filter(Boolean);
      const all = parts.length > 1 ? [word, ...parts] : [word];
      known.set(word, all.map((part) => stem(part.toLowerCase())));
    }
    return known.get(word);
  }
  const query_terms = (text) => words(text).map((word) => stem(word.toLowerCase()));

  function build(data) {
    const sections = [], documents = new Map(), titles = {}, places = new Map();
    let length = 0;
    for (const given of data.sections) {
      titles[given.page] ??= given.name;
      const api = given.kind === "api" || given.page.startsWith("api/");
      const lead = !api && titles[given.page] === given.name;
      const counts = new Map();
      const add = (text, weight) => {
        const found = words(text);
        for (const word of found) for (const term of terms(word)) counts.set(term, (counts.get(term) || 0) + weight);
        return found.length;
      };
      add(titles[given.page], lead ? 0 : WEIGHTS.title);
      add(given.name, WEIGHTS.name + (lead ? WEIGHTS.title : 0));
      const size = add(given.text, lead ? LEAD : WEIGHTS.text) + WEIGHTS.code * add(given.code, WEIGHTS.code);
      const rank = (KIND.find(([pattern]) => pattern.test(given.page)) || [0, 1])[1];
      const section = { ...given, api, lead, size, rank, heading: ` ${query_terms(given.name.replace(NUMBERS, "")).join(" ")} ` };
      for (const [term, weight] of counts) {
        if (!places.has(term)) places.set(term, []);
        places.get(term).push([sections.length, weight]);
        if (!api) documents.set(term, (documents.get(term) || 0) + 1);
      }
      length += size;
      sections.push(section);
    }
    const phrases = new Map();
    for (const [said, meant] of Object.entries(data.synonyms))
      phrases.set(query_terms(said).join(" "), meant);
    return { sections, titles, places, documents, phrases, mean: length / sections.length,
             many: sections.filter((section) => !section.api).length };
  }

  // What a query asks for: a list of concepts, each a list of alternatives with the terms that say it.
  function concepts(index, query) {
    const asked = words(query).map((word) => [stem(word.toLowerCase()), word.toLowerCase()]);
    const found = [], also = [];
    for (let start = 0; start < asked.length; ) {
      let end = asked.length;
      while (end > start && !index.phrases.has(asked.slice(start, end).map(([term]) => term).join(" "))) end -= 1;
      const whole = asked.slice(start, Math.max(end, start + 1));
      start += whole.length;
      const own = whole.filter(([, word]) => !stopwords.has(word) || KEPT.has(word)).map(([term]) => term);
      const meant = end > start - whole.length ? index.phrases.get(whole.map(([term]) => term).join(" ")) : [];
      if (!own.length && !meant.length) continue;
      if (!meant.length && whole.length === 1 && ASKED.has(whole[0][1])) continue;
      also.push(...meant);
      found.push([own, ...meant.map(query_terms)].filter((said) => said.length));
    }
    return { found, also };
  }

  function scores(index, alternative) {
    const whole = new Map();
    for (const term of alternative) {
      const rarity = Math.log(1 + (index.many + 1) / ((index.documents.get(term) || 0) + 0.5));
      for (const [place, weight] of index.places.get(term) || []) {
        const { size } = index.sections[place];
        const value = rarity * weight / (weight + 1.2 * (0.6 + 0.4 * size / index.mean));
        const [sum, count] = whole.get(place) || [0, 0];
        whole.set(place, [sum + value, count + 1]);
      }
    }
    const found = new Map(), phrase = ` ${alternative.join(" ")} `;
    for (const [place, [sum, count]] of whole) {
      const { heading } = index.sections[place];
      const named = heading === phrase ? 2.2 : heading.includes(phrase) ? 1.4 : 1;
      found.set(place, sum / Math.sqrt(alternative.length) * (count / alternative.length) ** 3 * named);
    }
    return found;
  }

  function rank(index, query) {
    const { found: asked, also } = concepts(index, query);
    const best = asked.map((alternatives) => {  // of each concept: its score in every section
      const merged = new Map();
      alternatives.forEach((alternative, i) => {
        for (const [place, score] of scores(index, alternative))
          merged.set(place, Math.max(merged.get(place) || 0, i ? 0.95 * score : score));
      });
      return merged;
    });
    const of_page = best.map((merged) => {  // of each concept: its best score on every page
      const pages = new Map();
      for (const [place, score] of merged) {
        const { page } = index.sections[place];
        pages.set(page, Math.max(pages.get(page) || 0, score));
      }
      return pages;
    });
    const hits = [];
    index.sections.forEach((section, place) => {
      let score = 0, covered = 0;
      best.forEach((merged, i) => {
        const here = merged.get(place) || 0, elsewhere = of_page[i].get(section.page) || 0;
        score += Math.max(here, section.api ? 0 : 0.3 * elsewhere);
        covered += here ? 1 : elsewhere && !section.api ? 0.6 : 0;
      });
      if (!best.some((merged) => merged.has(place))) return;
      score *= section.rank * (covered / asked.length) ** 2;
      hits.push({ section, score });
    });
    hits.sort((a, b) => b.score - a.score);
    const pages = new Map(), api = [];
    for (const hit of hits) {
      if (hit.section.api) {
        if (hit.section.kind === "api") api.push(hit);
        continue;
      }
      const page = pages.get(hit.section.page);
      if (!page) pages.set(hit.section.page, { ...hit, more: [] });
      else {
        if (page.more.length < 3) page.score += 0.1 * hit.score;
        if (hit.score > 0.4 * page.score) page.more.push(hit.section);
      }
    }
    const ordered = [...pages.values()].sort((a, b) => b.score - a.score);
    const lowest = ordered.length ? 0.12 * ordered[0].score : 0;
    const name = query.trim().replace(/\(\)$/, "");
    const exact = MEANT.test(name)
      ? api.filter(({ section }) => section.name === name || section.name.endsWith(`.${name}`)).map((hit) => hit.section) : [];
    return {
      exact, also, terms: new Set(asked.flat(2).filter((term) => !unmarked.has(term))),
      pages: ordered.filter((page) => page.score > lowest),
      api: api.map((hit) => hit.section).filter((section) => !exact.includes(section)).slice(0, 12),
    };
  }

  // The part of a text with most of what was asked, and where in it that stands.
  function excerpt(text, asked, size = 230) {
    const hits = [];
    for (const found of text.matchAll(/[\p{L}\p{N}_]+(?:[.-][\p{L}\p{N}_]+)*/gu))
      if (terms(found[0]).some((term) => asked.has(term)))
        hits.push([found.index, found.index + found[0].length, stem(found[0].toLowerCase())]);
    let from = 0, most = -1;
    hits.forEach(([start], i) => {
      const inside = hits.slice(i).filter(([, end]) => end < start + size - 60);
      const value = new Set(inside.map(([, , term]) => term)).size + 0.01 * inside.length;
      if (value > most) [from, most] = [start, value];
    });
    let start = Math.max(0, from - 60);
    const sentence = text.slice(start, from).search(/[.?!·] \S/);  // better from the beginning of a sentence
    if (start && sentence >= 0) start += sentence + 2;
    else if (start) start += text.slice(start).search(/\s/) + 1;
    let end = Math.min(text.length, start + size);
    if (end < text.length) end = Math.max(text.lastIndexOf(" ", end), start);
    const parts = [[start ? "… " : "", false]];
    let last = start;
    for (const [begin, stop] of hits.filter(([begin, stop]) => begin >= start && stop <= end)) {
      parts.push([text.slice(last, begin), false], [text.slice(begin, stop), true]);
      last = stop;
    }
    parts.push([text.slice(last, end) + (end < text.length ? " …" : ""), false]);
    return parts.filter(([part]) => part);
  }

  function element(tag, given = {}, ...inside) {
    const made = Object.assign(document.createElement(tag), given);
    made.append(...inside);
    return made;
  }
  const address = (section) => section.page + (section.anchor && !section.lead ? `#${section.anchor}` : "");
  function said(text, asked) {
    const parts = excerpt(text, asked).map(([part, hit]) => (hit ? element("mark", {}, part) : part));
    return element("p", { className: "excerpt" }, ...parts);
  }

  function show(index, query) {
    const out = document.getElementById("search-results");
    out.replaceChildren();
    if (!query.trim()) return;
    const found = rank(index, query), count = found.pages.length;
    const status = count ? `${count} ${count === 1 ? "page" : "pages"} found` : "No page found. The glossary lists the words of the book.";
    out.append(element("p", { className: "search-summary" }, status));
    if (found.also.length) out.append(element("p", { className: "search-also" }, `Also searched for: ${found.also.join(", ")}`));
    const entry = (section) => element("li", {}, element("a", { href: address(section) }, section.name), said(section.text, found.terms));
    if (found.exact.length) out.append(element("ul", { className: "search-exact" }, ...found.exact.map(entry)));
    const list = element("ol", { className: "search-pages" });
    for (const { section, more } of found.pages.slice(0, 25)) {
      const title = index.titles[section.page];
      const item = element("li", {}, element("a", { href: address(section) }, section.lead ? title : `${title} › ${section.name}`));
      item.append(said(section.text, found.terms));
      const others = more.slice(0, 3).map((other) => element("a", { href: address(other) }, other.lead ? "top of the page" : other.name));
      if (others.length) item.append(element("p", { className: "search-more" }, "also: ", ...others.flatMap((link, i) => (i ? [" · ", link] : [link]))));
      list.append(item);
    }
    if (count) out.append(list);
    if (found.api.length) out.append(element("h2", {}, "In the API"), element("ul", { className: "search-api" }, ...found.api.map(entry)));
  }

  function start() {
    const index = build(window.BOOK_SEARCH_DATA);
    const query = new URLSearchParams(window.location.search).get("q") || "";
    window.BOOK_SEARCH = { rank: (asked) => rank(index, asked), excerpt };
    const fields = [...document.querySelectorAll('input[name="q"]')];
    fields.forEach((field) => (field.value = query));
    const field = document.querySelector(".bd-search-container input[name='q']");
    let waiting;
    field.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => show(index, field.value), 150);
    });
    show(index, query);
    field.focus();
  }
  if (typeof document === "undefined") globalThis.BOOK_SEARCH = { build, rank, excerpt };
  else if (document.readyState === "loading") window.addEventListener("DOMContentLoaded", start);
  else start();
})();
