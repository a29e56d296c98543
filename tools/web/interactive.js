// Parts of pages that answer to mouse and keyboard, without a kernel and without a network.
//
// A page writes `<div class="interactive" data-kind="clip"><p>...</p><script type="application/json">...</script></div>`:
// a sentence for readers without JavaScript, and the page's own numbers. `KINDS` below says what is made of them. What the
// script computes carries its full precision in `data-value`, and tests compare that with what the package computes.
(() => {
  // ---- Arithmetic, in double precision as on the pages ----

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const mean = (values) => sum(values) / values.length;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  /** Split a list into consecutive parts of the given sizes. */
  function split(values, sizes) {
    let start = 0;
    return sizes.map((size) => values.slice(start, (start += size)));
  }

  /** Importance ratio of every chunk, equation (14): the exponential of the mean log-ratio. */
  const chunkRatios = (logRatios, sizes) => split(logRatios, sizes).map((part) => Math.exp(mean(part)));

  /** True where the clipped objective has no gradient. */
  const isClipped = (ratio, advantage, clipRange) =>
    (advantage > 0 && ratio > 1 + clipRange) || (advantage < 0 && ratio < 1 - clipRange);

  /** One term of equations (5) and (13). */
  const clippedTerm = (ratio, advantage, clipRange) =>
    Math.min(ratio * advantage, clamp(ratio, 1 - clipRange, 1 + clipRange) * advantage);

  // ---- Elements ----

  /** A number with its sign, rounded; what rounds to 0 has none. */
  function signed(number, digits = 3) {
    const size = Math.abs(number).toFixed(digits);
    return `${Number(size) === 0 ? "" : number < 0 ? "−" : "+"}${size}`;
  }

  const SVG = "http://www.w3.org/2000/svg";

  function put(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const make = (tag, attributes = {}, ...children) => put(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => put(document.createElementNS(SVG, tag), attributes, children);

  let made = 0;
  const newId = () => `interactive-${(made += 1)}`;

  /** A number that is shown rounded and carried in full. */
  const value = (number, text) => make("data", { "data-value": number, value: number }, text);

  /** A slider over the positions 0 ... count - 1; `say` puts a position into words. */
  function slider(label, count, start, say, changed) {
    const id = newId();
    const words = make("output", { for: id });
    const input = make("input", { type: "range", id, min: 0, max: count - 1, step: 1, value: start });
    const show = () => {
      words.textContent = say(Number(input.value));
      input.setAttribute("aria-valuetext", words.textContent);
    };
    input.addEventListener("input", () => {
      show();
      changed();
    });
    show();
    return { input, show, row: make("div", { class: "control" }, make("label", { for: id }, label, " ", words), input) };
  }

  /** A list to choose from; options are [value, text]. */
  function choice(label, options, changed) {
    const id = newId();
    const input = make("select", { id }, ...options.map(([option, text]) => make("option", { value: option }, text)));
    input.addEventListener("input", changed);
    return { input, row: make("div", { class: "control" }, make("label", { for: id }, label), input) };
  }

  function button(words, pressed) {
    const node = make("button", { type: "button" }, words);
    node.addEventListener("click", pressed);
    return node;
  }

  const legend = (...entries) =>
    make("p", { class: "legend" }, ...entries.map(([name, text]) => make("span", { class: `key ${name}` }, text)));

  /** Where results are said; screen readers announce what changes in it. */
  const answer = () => make("p", { class: "answer", "aria-live": "polite" });

  /** A table of rows of cells; the first cell of a row is its head. */
  const table = (heads, rows) =>
    make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map(([head, ...cells]) =>
        make("tr", {}, make("th", { scope: "row" }, head), ...cells.map((cell) => make("td", {}, cell))))));

  /** A drawing as wide as its box, so that letters keep their size on a phone. `paint(svg, width)` fills it. */
  function chart(height, label, paint) {
    const picture = draw("svg", { height, role: "img", "aria-label": label });
    const repaint = () => {
      const width = picture.parentElement ? picture.parentElement.clientWidth : 0;
      if (!width) return;
      picture.setAttribute("width", width);
      picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
      picture.replaceChildren();
      paint(picture, width);
    };
    const box = make("div", { class: "chart" }, picture);
    new ResizeObserver(repaint).observe(box);
    return { box, repaint, picture };
  }

  const tickWord = (tick) => String(Number(tick.toPrecision(6))).replace("-", "−");

  /** Horizontal grid lines with their numbers, and the axis' name above them. */
  function axis(picture, { ticks, y, left, width, name }) {
    for (const tick of ticks)
      picture.append(
        draw("line", { class: tick === 0 ? "grid zero" : "grid", x1: left, x2: width, y1: y(tick), y2: y(tick) }),
        draw("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, tickWord(tick)));
    picture.append(draw("text", { class: "name", x: 0, y: 12 }, name));
  }

  const LEFT = 34;  // of a chart's plot, px: room for the numbers of its axis

  // ---- (a) Step against chunk ----

  /** Ratios, clipping, objective and gradient of steps and chunks under one clip range. */
  function clip(place, data) {
    const { log_ratio: logRatios, advantage: advantages, sizes, clip_ranges: clipRanges } = data;
    const images = logRatios.length, T = logRatios[0].length, K = sizes.length;
    const chunkOf = sizes.flatMap((size, chunk) => Array(size).fill(chunk));
    const scientific = (number) => {
      if (number === 0) return "0";
      const [digits, power] = number.toExponential(2).split("e");
      return `${digits}e${Number(power)}`.replace(/-/g, "−");
    };

    const range = slider("Clip range ε:", clipRanges.length, data.start,
      (at) => clipRanges[at].toExponential(1).replace(".0", "").replace("-", "−"), () => update());
    const image = choice("Image", advantages.map((A, i) => [i, `${i + 1}, advantage ${signed(A, 2)}`]), () => update());
    const said = answer();
    const numbers = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of the image" });
    let now;

    /** What both objectives make of the group, and of the image that is shown. */
    function compute() {
      const eps = clipRanges[Number(range.input.value)], shown = Number(image.input.value);
      const of = (groupSizes) => {
        const count = groupSizes.length;
        const ratios = logRatios.map((row) => chunkRatios(row, groupSizes));
        const cut = ratios.map((row, i) => row.map((ratio) => isClipped(ratio, advantages[i], eps)));
        const terms = ratios.flatMap((row, i) => row.map((ratio) => clippedTerm(ratio, advantages[i], eps)));
        const silent = cut.map((row) => sum(row.map((is, j) => is * groupSizes[j])));
        // (grad): the derivative of the objective by a transition's log-probability, of the image that is shown
        const gradient = ratios[shown].map((ratio, j) =>
          cut[shown][j] ? 0 : (advantages[shown] * ratio) / (images * count * groupSizes[j]));
        return { ratios: ratios[shown], cut: cut[shown], objective: mean(terms), silent: sum(silent) / (images * T), gradient };
      };
      now = { eps, shown, A: advantages[shown], steps: of(Array(T).fill(1)), chunks: of(sizes) };
    }

    const UNIT = 1e-4;  // of ratio - 1 on the axis
    const ratioChart = chart(200, "Ratios of the image's steps and chunks beside the clip range", (picture, width) => {
      const tallest = Math.max(...logRatios[now.shown].map(Math.abs)) / UNIT;
      const x = (t) => LEFT + ((t + 0.5) / T) * (width - LEFT);
      const y = (height) => 108 - (clamp(height, -1.05 * tallest, 1.05 * tallest) / tallest) * 80;
      const high = y(now.eps / UNIT), low = y(-now.eps / UNIT);
      picture.append(draw("rect", { class: "band", x: LEFT, width: width - LEFT, y: high, height: low - high }));
      const step = tallest > 4 ? 2 : 1;
      const ticks = [-2, -1, 0, 1, 2].map((k) => k * step).filter((tick) => Math.abs(tick) <= tallest);
      axis(picture, { ticks, y, left: LEFT, width, name: "ratio − 1, in 1/10,000" });
      split([...Array(T).keys()], sizes).forEach((part, j) => {
        const left = x(part[0] - 0.38), right = x(part.at(-1) + 0.38), height = y((now.chunks.ratios[j] - 1) / UNIT);
        picture.append(draw("rect", {
          class: `chunk ${now.chunks.cut[j] ? "hollow" : ""}`, x: left, width: right - left, y: height - 3.5, height: 7 }));
      });
      now.steps.ratios.forEach((ratio, t) => {
        const height = y((ratio - 1) / UNIT);
        picture.append(
          draw("line", { class: "step", x1: x(t), x2: x(t), y1: y(0), y2: height }),
          draw("circle", { class: `step ${now.steps.cut[t] ? "hollow" : ""}`, cx: x(t), cy: height, r: 4 }));
      });
    });

    const gradientChart = chart(120, "Gradient of each transition's log-probability", (picture, width) => {
      const x = (t) => LEFT + ((t + 0.5) / T) * (width - LEFT), wide = (0.36 * (width - LEFT)) / T;
      const scale = images * T;
      const most = Math.max(...advantages.map(Math.abs)) * (T / (K * Math.min(...sizes)));
      const sign = Math.sign(now.A) || 1;
      const y = (height) => (sign > 0 ? 98 : 24) - (height / most) * 74;
      axis(picture, { ticks: [0, sign * Math.floor(most)], y, left: LEFT, width, name: "gradient of a transition, times B n" });
      for (let t = 0; t < T; t += 1)
        for (const [name, gradient, shift] of [
          ["step", now.steps.gradient[t], -wide], ["chunk", now.chunks.gradient[chunkOf[t]], 0]]) {
          const end = y(gradient * scale);
          picture.append(draw("rect", {
            class: name, x: x(t) + shift, width: wide, y: Math.min(y(0), end), height: Math.abs(end - y(0)) }));
        }
      picture.append(
        draw("text", { x: LEFT, y: 116 }, "first transition"),
        draw("text", { x: width, y: 116, "text-anchor": "end" }, "last"));
    });

    function update() {
      compute();
      const { steps, chunks, A } = now, count = (cut) => cut.filter(Boolean).length;
      ratioChart.repaint();
      gradientChart.repaint();
      said.replaceChildren(
        `Image ${now.shown + 1}: `, value(count(steps.cut), `${count(steps.cut)} of ${T} steps`), " and ",
        value(count(chunks.cut), `${count(chunks.cut)} of ${K} chunks`), " are clipped. Over the group, steps leave ",
        value(steps.silent, `${(100 * steps.silent).toFixed(0)}%`), " of all transitions without a gradient, chunks ",
        value(chunks.silent, `${(100 * chunks.silent).toFixed(0)}%`), ". Step objective (5): ",
        value(steps.objective, scientific(steps.objective)), ", chunk objective (13): ",
        value(chunks.objective, scientific(chunks.objective)), ".");
      numbers.replaceChildren(table(
        ["transition", "step ratio − 1", "chunk ratio − 1", "gradient, steps", "gradient, chunks"],
        chunkOf.map((j, t) => [
          String(t),
          value(steps.ratios[t] - 1, scientific(steps.ratios[t] - 1)),
          value(chunks.ratios[j] - 1, scientific(chunks.ratios[j] - 1)),
          value(steps.gradient[t], scientific(steps.gradient[t])),
          value(chunks.gradient[j], scientific(chunks.gradient[j])),
        ])));
    }

    place.append(
      make("div", { class: "controls" }, range.row, image.row),
      legend(["step", "step"], ["chunk", "chunk"], ["hollow", "hollow: clipped"], ["band", "clip range"]),
      ratioChart.box, gradientChart.box, said,
      make("details", {}, make("summary", {}, "Numbers of this image"), numbers));
    update();
  }

  // ---- (b) Chunk cutter ----

  /** The standard normal distribution function, by its series around 0; exact to double precision for |x| < 7. */
  function normalCdf(x) {
    if (Math.abs(x) > 7) return x > 0 ? 1 : 0;
    let term = x, total = x;
    for (let k = 1; Math.abs(term) > 1e-17; k += 1) total += term *= (x * x) / (2 * k + 1);
    return 0.5 + (total * Math.exp((-x * x) / 2)) / Math.sqrt(2 * Math.PI);
  }

  /** Share of clipped chunks if log-ratios of steps are independent with a spread of so many clip ranges, mean over both signs of A. */
  function clippedShare(size, spread, clipRange) {
    const reach = Math.sqrt(size) / (spread * clipRange);
    return (normalCdf(-reach * Math.log1p(clipRange)) + normalCdf(reach * Math.log1p(-clipRange))) / 2;
  }

  /** Boundaries set by hand over a profile: chunks, their weights, and how often each would be clipped. */
  function chunks(place, data) {
    const n = data.profiles[0].distance.length;
    const own = "own";
    const profile = choice("Sampler of the profile", data.profiles.map((entry, i) => [i, entry.name]), () => {
      if (preset.input.value !== own) applyPreset();
      update();
    });
    const preset = choice("Chunks", [...data.presets.map((entry, i) => [i, entry.name]), [own, "set by hand"]], () => {
      applyPreset();
      update();
    });
    const spread = slider("Spread of a step's log-ratio, in clip ranges:", data.spreads.length, data.start,
      (at) => String(data.spreads[at]), () => update());
    const boxes = Array.from({ length: n - 1 }, (_, i) => {
      const box = make("input", {
        type: "checkbox", "aria-label": `boundary between transitions ${i} and ${i + 1}`,
        style: `left: calc(${LEFT}px + (100% - ${LEFT}px) * ${(i + 1) / n})` });
      box.addEventListener("input", () => {
        preset.input.value = own;
        update();
      });
      return box;
    });
    const said = answer();
    const numbers = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of the chunks" });
    let now;

    function applyPreset() {
      const chosen = data.presets[Number(preset.input.value)];
      if (!chosen) return;  // the boundaries that are set stay
      const sizes = chosen.sizes[Number(profile.input.value)];
      const ends = new Set(sizes.map((_, j) => sum(sizes.slice(0, j + 1))));
      boxes.forEach((box, i) => (box.checked = ends.has(i + 1)));
    }

    function compute() {
      const ends = [...boxes.flatMap((box, i) => (box.checked ? [i + 1] : [])), n];
      const sizes = ends.map((end, j) => end - (j ? ends[j - 1] : 0));
      const distance = data.profiles[Number(profile.input.value)].distance;
      const means = split(distance, sizes).map(mean);
      const weights = means.map((height) => height / sum(means));  // (16)
      const perStep = sizes.map((size) => n / (sizes.length * size));  // n / (K cs)
      const shares = sizes.map((size) => clippedShare(size, data.spreads[Number(spread.input.value)], data.clip_range));
      now = { sizes, ends, distance, means, weights, perStep, shares };
    }

    const picture = chart(190, "Profile with the mean of every chunk; a click sets or removes the nearest boundary", (svg, width) => {
      const x = (t) => LEFT + (t / n) * (width - LEFT);
      const most = Math.max(...now.distance), unit = most > 1 ? 0.5 : most > 0.4 ? 0.2 : 0.1;
      const y = (height) => 182 - (height / most) * 150;
      const ticks = Array.from({ length: Math.floor(most / unit) + 1 }, (_, k) => k * unit);
      axis(svg, { ticks, y, left: LEFT, width, name: "expected L1_rel of a transition" });
      now.means.forEach((height, j) => {
        const left = x(now.ends[j] - now.sizes[j]), right = x(now.ends[j]);
        svg.append(
          draw("rect", { class: "mean", x: left + 1, width: right - left - 2, y: y(height), height: y(0) - y(height) }),
          draw("line", { class: "chunk", x1: left + 1, x2: right - 1, y1: y(height), y2: y(height) }));
        if (j) svg.append(draw("line", { class: "cut", x1: left, x2: left, y1: 20, y2: y(0) }));
        if (right - left > 34)
          svg.append(draw("text", { x: (left + right) / 2, y: y(0) - 6, "text-anchor": "middle" }, now.weights[j].toFixed(2)));
      });
      now.distance.forEach((height, t) => svg.append(draw("circle", { class: "step", cx: x(t + 0.5), cy: y(height), r: 3 })));
    });
    picture.picture.classList.add("clickable");
    picture.picture.addEventListener("click", (event) => {
      const { left, width } = picture.picture.getBoundingClientRect();
      const at = Math.round(((event.clientX - left - LEFT) / (width - LEFT)) * n) - 1;
      if (boxes[at]) boxes[at].click();
    });

    function update() {
      compute();
      picture.repaint();
      const { sizes, weights, perStep, shares, ends } = now;
      const all = sum(sizes.map((size, j) => size * shares[j])) / n;
      said.replaceChildren(
        make("code", {}, `chunks=${sizes.join(",")}`), `: ${sizes.length} ${sizes.length === 1 ? "chunk" : "chunks"}. The weights (16) are `,
        `${(Math.max(...weights) / Math.min(...weights)).toFixed(1)} to 1 at most. `,
        value(all, `${(100 * all).toFixed(1)}%`), " of all transitions are clipped.");
      numbers.replaceChildren(table(
        ["chunk", "transitions", "weight (16)", "weight of a step", "clipped"],
        sizes.map((size, j) => [
          String(j + 1),
          size === 1 ? String(ends[j] - 1) : `${ends[j] - size}–${ends[j] - 1}`,
          value(weights[j], weights[j].toFixed(3)),
          value(perStep[j], perStep[j].toFixed(2)),
          value(shares[j], `${(100 * shares[j]).toFixed(1)}%`),
        ])));
    }

    preset.input.value = "0";
    applyPreset();
    place.append(
      make("div", { class: "controls" }, profile.row, preset.row, spread.row),
      legend(["step", "transition"], ["chunk", "mean of a chunk, with its weight (16)"]),
      picture.box,
      make("fieldset", {},
        make("div", { class: "cuts" }, ...boxes),
        make("legend", {}, "Boundaries: tick a box between two transitions, or click the drawing")),
      said, numbers);
    update();
  }

  // ---- (c) Particles under the ODE and the SDE ----

  /** Coefficients (a, b, std) of a transition of the sampler flow: mean = a x + b v. Strength 0 gives Euler's step. */
  function flowStep(levels, i, eta) {
    const sigma = levels[i], step = levels[i + 1] - sigma, isLast = i === levels.length - 2;
    if (eta === 0 || isLast) return [1, step, 0];
    const s = eta * Math.sqrt(sigma / (1 - (sigma > 1 - 1e-6 ? levels[1] : sigma)));
    const pull = ((s * s) / (2 * sigma)) * step;
    return [1 + pull, step + pull * (1 - sigma), s * Math.sqrt(-step)];
  }

  /** Particles of a mixture of Gaussians in the plane: left the ODE, right the SDE, step by step. */
  function particles(place, data) {
    const { modes, scale, levels, start: starts, noise, etas } = data;
    const T = levels.length - 1, SHOWN = 6;  // paths that are drawn

    const variance = (t) => (1 - t) ** 2 * scale ** 2 + t ** 2;

    /** Exact velocity of the flow from noise to the modes at one point. */
    function velocity(point, t) {
      const spread = variance(t);
      const offsets = modes.map((mode) => mode.map((centre, axis_) => point[axis_] - (1 - t) * centre));
      const weights = offsets.map(([x, y]) => -(x * x + y * y) / (2 * spread)), most = Math.max(...weights);
      const shares = weights.map((weight) => Math.exp(weight - most)), total = sum(shares);
      return [0, 1].map((axis_) => sum(modes.map((mode, k) =>
        (shares[k] / total) * (-mode[axis_] + ((t - (1 - t) * scale ** 2) / spread) * offsets[k][axis_]))));
    }

    /** Positions of all particles after every step, [step][particle] = [x, y]. */
    function simulate(eta) {
      const path = [starts];
      for (let i = 0; i < T; i += 1) {
        const [a, b, std] = flowStep(levels, i, eta);
        path.push(path[i].map((point, n) => {
          const v = velocity(point, levels[i]);
          return [0, 1].map((axis_) => a * point[axis_] + b * v[axis_] + std * noise[i][n][axis_]);
        }));
      }
      return path;
    }

    /** Standard deviation of a cloud, over both coordinates. */
    function spreadOf(points) {
      return Math.sqrt(mean([0, 1].map((axis_) => {
        const middle = mean(points.map((point) => point[axis_]));
        return mean(points.map((point) => (point[axis_] - middle) ** 2));
      })));
    }
    const lengthOf = (path, step) => mean(starts.map((_, n) =>
      sum(path.slice(0, step).map((points, i) =>
        Math.hypot(path[i + 1][n][0] - points[n][0], path[i + 1][n][1] - points[n][1])))));
    const nearest = (point) => {
      const far = modes.map((mode) => Math.hypot(point[0] - mode[0], point[1] - mode[1]));
      return far.indexOf(Math.min(...far));
    };
    const ofModes = mean([0, 1].map((axis_) => {
      const middle = mean(modes.map((mode) => mode[axis_]));
      return mean(modes.map((mode) => (mode[axis_] - middle) ** 2));
    }));

    const ode = simulate(0);
    let sde = simulate(etas[data.first]), timer = null;
    const eta = slider("Noise η:", etas.length, data.first, (at) => etas[at].toFixed(1), () => {
      sde = simulate(etas[Number(eta.input.value)]);
      update();
    });
    const time = slider("Step:", T + 1, T, (at) => `${at} of ${T}, t = ${levels[at].toFixed(2)}`, () => {
      stop();
      update();
    });
    const said = answer();
    const play = button("Play", () => (timer ? stop() : run()));

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
      said.setAttribute("aria-live", "polite");
    }
    function setStep(step) {
      time.input.value = step;
      time.show();
      update();
    }
    function run() {
      if (matchMedia("(prefers-reduced-motion: reduce)").matches) return setStep(T);
      play.textContent = "Stop";
      said.setAttribute("aria-live", "off");  // the numbers of the last step are announced
      setStep(0);
      timer = setInterval(() => {
        const next = Number(time.input.value) + 1;
        if (next >= T) stop();
        setStep(Math.min(next, T));
      }, 90);
    }

    const REACH = 3.4;  // of the drawn plane, from its middle
    const picture = chart(300, "Particles under the ODE, left, and the SDE, right, with the exact marginal as circles", (svg, width) => {
      const gap = 8, side = (width - gap) / 2, step = Number(time.input.value), t = levels[step];
      const height = Math.min(side, 276), unit = height / (2 * REACH);
      svg.setAttribute("height", height + 24);
      svg.setAttribute("viewBox", `0 0 ${width} ${height + 24}`);
      [["ODE", ode], [`SDE, η = ${etas[Number(eta.input.value)].toFixed(1)}`, sde]].forEach(([name, path], panel) => {
        const x = (at) => panel * (side + gap) + side / 2 + at * unit, y = (at) => 20 + height / 2 - at * unit;
        svg.append(draw("text", { class: "name", x: panel * (side + gap), y: 12 }, name));
        for (const mode of modes)
          svg.append(draw("circle", {
            class: "marginal", cx: x((1 - t) * mode[0]), cy: y((1 - t) * mode[1]), r: unit * Math.sqrt(5.991 * variance(t)) }));
        path[step].forEach(([px, py]) => svg.append(draw("circle", { class: "step", cx: x(px), cy: y(py), r: 2 })));
        for (let n = 0; n < SHOWN; n += 1) {
          const points = path.slice(0, step + 1).map((row) => `${x(row[n][0]).toFixed(1)},${y(row[n][1]).toFixed(1)}`);
          svg.append(
            draw("polyline", { class: "trail", points: points.join(" ") }),
            draw("circle", { class: "chunk", cx: x(path[step][n][0]), cy: y(path[step][n][1]), r: 3 }));
        }
      });
    });

    function update() {
      picture.repaint();
      const step = Number(time.input.value), t = levels[step];
      const exact = Math.sqrt((1 - t) ** 2 * ofModes + variance(t));
      const [a, b] = [ode, sde].map((path) => ({ spread: spreadOf(path[step]), length: lengthOf(path, step) }));
      const moved = starts.filter((_, n) => nearest(ode[T][n]) !== nearest(sde[T][n])).length;
      said.replaceChildren(
        "Standard deviation of the cloud: ODE ", value(a.spread, a.spread.toFixed(2)), ", SDE ", value(b.spread, b.spread.toFixed(2)),
        ", exact ", value(exact, exact.toFixed(2)), ". Mean length of a path: ODE ", value(a.length, a.length.toFixed(1)),
        ", SDE ", value(b.length, b.length.toFixed(1)), ". The noise takes ", value(moved, String(moved)), ` of ${starts.length} particles to another mode.`);
    }

    place.append(
      make("div", { class: "controls" }, eta.row, time.row, play),
      legend(["step", "particle"], ["chunk", "path of one particle"], ["ring", "95% of a mode, exact"]),
      picture.box, said);
    update();
  }

  // ---- (d) Seed roulette ----

  /** One seed per arm, as in a study with a single run per arm; then the paired interval over all seeds. */
  function seeds(place, data) {
    const { arms, seeds: numbers, gains, reference, quantile } = data;
    const others = arms.filter((arm) => arm !== reference);
    const draws = [];  // of each, the position of the seed of every arm
    let revealed = false;

    const gain = (draw, arm) => gains[arm][draw[arm]];
    const difference = (draw, arm) => gain(draw, arm) - gain(draw, reference);
    const best = (draw) => arms.reduce((first, arm) => (gain(draw, arm) > gain(draw, first) ? arm : first));
    const drawOnce = () =>
      draws.push(Object.fromEntries(arms.map((arm) => [arm, Math.floor(Math.random() * numbers.length)])));

    /** Mean of the differences on the same seeds, and its t interval. */
    function interval(arm) {
      const paired = gains[arm].map((value, i) => value - gains[reference][i]), middle = mean(paired);
      const deviation = Math.sqrt(sum(paired.map((value) => (value - middle) ** 2)) / (paired.length - 1));
      const half = (quantile * deviation) / Math.sqrt(paired.length);
      return { mean: middle, low: middle - half, high: middle + half };
    }
    const intervals = Object.fromEntries(others.map((arm) => [arm, interval(arm)]));

    const said = answer();
    const results = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Results of the draw" });
    const reveal = button("Show the interval of all seeds", () => {
      revealed = true;
      update();
    });
    const one = button("Draw one seed per arm", () => {
      drawOnce();
      update();
    });
    const many = button("Draw 100 times", () => {
      for (let i = 0; i < 100; i += 1) drawOnce();
      update();
    });

    const pooled = others.flatMap((arm) => [
      Math.min(...gains[arm]) - Math.max(...gains[reference]), Math.max(...gains[arm]) - Math.min(...gains[reference])]);
    const low = Math.min(...pooled), high = Math.max(...pooled);
    const picture = chart(44 * others.length + 30, `Differences from ${reference}, draw by draw`, (svg, width) => {
      const x = (at) => 10 + ((at - low) / (high - low)) * (width - 20), bottom = 44 * others.length + 6;
      svg.append(draw("line", { class: "grid zero", x1: x(0), x2: x(0), y1: 4, y2: bottom }));
      for (const tick of [-0.05, 0, 0.05].filter((at) => at > low && at < high))
        svg.append(draw("text", { x: x(tick), y: bottom + 16, "text-anchor": "middle" }, tickWord(tick)));
      others.forEach((arm, row) => {
        const y = 44 * row + 32;
        svg.append(draw("text", { x: 0, y: y - 16 }, `${arm} − ${reference}`));
        draws.slice(-300).forEach((draw_, i, shown) => {
          const last = i === shown.length - 1;
          svg.append(draw("circle", { class: last ? "step" : "step faint", cx: x(difference(draw_, arm)), cy: y, r: last ? 5 : 3 }));
        });
        if (!revealed) return;
        const { mean: middle, low: from, high: to } = intervals[arm];
        svg.append(
          draw("line", { class: "chunk", x1: x(from), x2: x(to), y1: y, y2: y }),
          draw("circle", { class: "chunk", cx: x(middle), cy: y, r: 4 }));
      });
    });

    function update() {
      const last = draws.at(-1);
      reveal.disabled = !last || revealed;
      picture.repaint();
      if (!last) {
        said.replaceChildren("Nothing is drawn yet.");
        return;
      }
      const parts = [`With these seeds ${best(last)} gains most.`];
      if (draws.length > 1)
        parts.push(" In ", value(draws.length, String(draws.length)), " draws the first place went to ",
          arms.map((arm) => `${arm} ${draws.filter((draw_) => best(draw_) === arm).length} times`).join(", "), ".");
      if (revealed) {
        const turned = others.map((arm) =>
          draws.filter((draw_) => difference(draw_, arm) * intervals[arm].mean < 0).length);
        parts.push(" Draws whose difference has another sign than the mean over all seeds: ",
          others.map((arm, i) => `${arm} ${turned[i]} of ${draws.length}`).join(", "), ".");
      }
      said.replaceChildren(...parts);
      const heads = ["arm", "seed", "gain", `minus ${reference}, this draw`];
      if (revealed) heads.push(`minus ${reference}, ${numbers.length} seeds`);
      results.replaceChildren(table(heads, arms.map((arm) => {
        const cells = [
          arm,
          value(numbers[last[arm]], String(numbers[last[arm]])),
          value(gain(last, arm), signed(gain(last, arm))),
          arm === reference ? "" : value(difference(last, arm), signed(difference(last, arm))),
        ];
        if (!revealed) return cells;
        const whole = make("span");
        if (arm !== reference) {
          const { mean: middle, low: from, high: to } = intervals[arm];
          whole.append(value(middle, signed(middle)), " (", value(from, signed(from)), " to ", value(to, signed(to)), ")");
        }
        return [...cells, whole];
      })));
    }

    place.append(
      make("div", { class: "controls" }, one, many, reveal),
      legend(["step", "difference in one draw"], ["chunk", "mean and 95% interval over all seeds"]),
      picture.box, said, results);
    update();
  }

  // ---- (e) Method explorer ----

  /** Filter the table of methods, and show where two of them differ. */
  function methods(place, data) {
    const { axes, costs } = data;
    const byName = Object.fromEntries(data.methods.map((method) => [method.name, method]));
    const everything = "";
    const words = (method) => [method.name, method.title, method.source, method.idea, ...axes.map((axis) => method[axis])]
      .join(" ").toLowerCase();

    const id = newId();
    const search = make("input", { type: "search", id });
    search.addEventListener("input", () => update());
    const axisChoice = choice("Axis", [[everything, "any"], ...axes.map((axis) => [axis, axis])], () => {
      fillChoices();
      update();
    });
    const valueChoice = choice("Choice on it", [], () => update());
    const names = data.methods.map((method) => [method.name, `${method.name}: ${method.title}`]);
    const first = choice("First method", names, () => update());
    const second = choice("Second method", names, () => update());
    [first.input.value, second.input.value] = data.start;
    const said = answer();
    const list = make("ul", { class: "found", tabindex: 0, "aria-label": "Methods that fit" });
    const compared = answer();
    const difference = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Difference of two methods" });

    function fillChoices() {
      const axis = axisChoice.input.value;
      const found = axis === everything ? [] : [...new Set(data.methods.map((method) => method[axis]))].sort();
      valueChoice.input.replaceChildren(
        ...[[everything, "any"], ...found.map((text) => [text, text])].map(([option, text]) => make("option", { value: option }, text)));
      valueChoice.input.disabled = axis === everything;
    }

    function update() {
      const axis = axisChoice.input.value, wanted = valueChoice.input.value, text = search.value.trim().toLowerCase();
      const found = data.methods.filter((method) =>
        words(method).includes(text) && (axis === everything || wanted === everything || method[axis] === wanted));
      said.replaceChildren(value(found.length, String(found.length)), ` of ${data.methods.length} methods fit. `,
        "Press one to compare it with the method pressed before.");
      list.replaceChildren(...found.map((method) => {
        const node = button(method.name, () => {
          first.input.value = second.input.value;
          second.input.value = method.name;
          compare();
        });
        return make("li", {}, node, make("span", {}, `${method.title}: ${method.idea}`));
      }));
      compare();
    }

    function compare() {
      const [a, b] = [first, second].map((pick) => byName[pick.input.value]);
      const apart = axes.filter((axis) => a[axis] !== b[axis]), equal = axes.filter((axis) => a[axis] === b[axis]);
      compared.replaceChildren(
        `${a.name} and ${b.name} differ on `, value(apart.length, String(apart.length)), ` of ${axes.length} axes`,
        equal.length ? ` and agree on ${equal.join(", ")}.` : ".");
      const rows = apart.map((axis) => [axis, a[axis], b[axis]]);
      for (const cost of costs) rows.push([`${cost}, per image`, value(a[cost], String(a[cost])), value(b[cost], String(b[cost]))]);
      difference.replaceChildren(table(["axis", a.name, b.name], rows));
    }

    fillChoices();
    place.append(
      make("div", { class: "controls" },
        make("div", { class: "control" }, make("label", { for: id }, "Words"), search), axisChoice.row, valueChoice.row),
      said, list, make("div", { class: "controls" }, first.row, second.row), compared, difference);
    update();
  }

  // ---- Start ----

  const KINDS = { clip, chunks, particles, seeds, methods };

  function start() {
    for (const place of document.querySelectorAll(".interactive[data-kind]")) {
      const data = JSON.parse(place.querySelector("script[type='application/json']").textContent);
      place.replaceChildren();
      place.setAttribute("role", "group");
      place.setAttribute("aria-label", data.title);
      place.append(make("p", { class: "title" }, data.title));
      KINDS[place.dataset.kind](place, data);
      place.dataset.ready = "true";
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
