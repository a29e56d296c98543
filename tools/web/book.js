// What does not fit the screen: equations shrink a little and then scroll; tables scroll, or turn into a block a row on a phone.
(() => {
  const SMALLEST = 0.7;  // of an equation's usual size
  const STACKED_BELOW = 800;  // px of the screen, below which a wide table is set a block a row

  function fitEquations() {
    for (const math of document.querySelectorAll(".bd-article mjx-container")) {
      const display = math.getAttribute("display") === "true";
      const box = (display && math.closest("div.math")) || math.closest("p, li, td, dd") || math.parentElement;
      const scrolling = display ? box : math;
      math.style.fontSize = "";
      scrolling.classList.remove("scrolls");
      const parts = [math, ...math.querySelectorAll("mjx-math, mjx-mtable")];  // a numbered one is wider than its formula
      const wide = () => Math.max(...parts.map((part) => Math.max(part.getBoundingClientRect().width, part.scrollWidth)));
      const room = box.clientWidth;
      if (!room || wide() <= room + 1) continue;
      math.style.fontSize = `${Math.max(SMALLEST, (0.98 * room) / wide()) * 100}%`;
      if (wide() > room + 1) {
        scrolling.classList.add("scrolls");
        scrolling.tabIndex = 0;
      }
    }
  }

  const SCROLLING = ".tablebox, .table-box, .output.text_html, .pst-scrollable-table-container";

  /** Let a box that scrolls be reached by the keyboard, and say what it is; undo that for one that does not. */
  function setRegion(box, isRegion) {
    if (isRegion) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "Table, scrolls sideways");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
  }

  function fitTables() {
    for (const table of document.querySelectorAll(".bd-article table:not(.interactive table, .grid table)")) {
      table.classList.remove("stacked", "wide");
      const box = table.closest(SCROLLING) || table.parentElement;
      setRegion(box, false);
      const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
      const wide = table.getBoundingClientRect().width > box.clientWidth + 1;
      if (!wide || !heads.length) continue;
      if (window.innerWidth > STACKED_BELOW) {
        table.classList.add("wide");
        setRegion(box, true);
        continue;
      }
      if (table.querySelector("[colspan], [rowspan]")) continue;
      for (const row of table.tBodies[0].rows)
        [...row.cells].forEach((cell, i) => (cell.dataset.label = heads[i] || ""));
      table.classList.add("stacked");
    }
  }

  /** A field above each grid that shows the rows with all the words that are typed. */
  function addFilters() {
    for (const grid of document.querySelectorAll(".bd-article .grid")) {
      const rows = [...grid.querySelectorAll("tbody tr")], bar = document.createElement("p");
      bar.className = "grid-filter";
      bar.innerHTML = '<label>Filter rows <input type="search"></label><output aria-live="polite"></output>';
      const [input, said] = [bar.querySelector("input"), bar.querySelector("output")];
      const filter = () => {
        const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
        for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        said.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
      };
      input.addEventListener("input", filter);
      filter();
      grid.before(bar);
    }
  }

  /** The arrows that unfold the side bar have no words of their own. */
  function nameArrows() {
    for (const arrow of document.querySelectorAll("nav details > summary:not([aria-label])")) {
      const link = arrow.closest("li") && arrow.closest("li").querySelector("a");
      if (link) arrow.setAttribute("aria-label", `Pages of ${link.textContent.trim()}`);
    }
  }

  let last = 0;
  function fit() {
    fitTables();
    fitEquations();
    document.documentElement.dataset.fitted = "true";
  }
  function start() {
    const typeset = window.MathJax && window.MathJax.startup && window.MathJax.startup.promise;
    if (document.querySelector(".math") && !typeset) return setTimeout(start, 50);
    Promise.resolve(typeset).then(fit);
  }
  document.addEventListener("DOMContentLoaded", () => {
    addFilters();
    nameArrows();
  });
  window.addEventListener("load", start);
  window.addEventListener("resize", () => {
    if (window.innerWidth !== last) fit();
    last = window.innerWidth;
  });
})();
