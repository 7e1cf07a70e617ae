(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const preference = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: isTouch ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  let chosen = null;

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  /* The template of figures in the colours of the theme. */
  function template() {
    const axis = {
      showline: true, linecolor: colour("line"), gridcolor: colour("grid"), zerolinecolor: colour("line"),
    };
    return {
      layout: {
        font: { color: colour("ink") },
        hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") } },
        modebar: { color: colour("soft"), activecolor: colour("accent"), bgcolor: "rgba(0,0,0,0)" },
        shapedefaults: { line: { color: colour("soft") } },
        xaxis: axis,
        yaxis: axis,
      },
    };
  }

  function applyTheme() {
    const dark = chosen === null ? preference.matches : chosen === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    button.textContent = dark ? "light" : "dark";
    for (const chart of document.querySelectorAll(".chart.js-plotly-plot")) {
      Plotly.relayout(chart, { template: template() });
    }
  }

  function plot(chart) {
    const figure = figures[chart.id];
    if (!figure || chart.classList.contains("js-plotly-plot")) {
      return;
    }
    if (isTouch) {
      // a finger on a figure scrolls the page; buttons zoom
      figure.layout.dragmode = false;
    }
    figure.layout.template = template();
    const entries = legendEntries(figure);
    figure.layout.showlegend = false;
    Plotly.newPlot(chart, figure.data, figure.layout, config);
    if (entries.length > 0) {
      addLegend(chart, entries);
    }
    fitCells(chart);
  }

  /* Traces of a figure by what its legend names; none where it has no legend. */
  function legendEntries(figure) {
    const groups = new Map();
    figure.data.forEach(function (trace, index) {
      if (trace.type === "bar" || trace.type === "scatter") {
        const key = trace.legendgroup || "trace " + index;
        const entry = groups.get(key) || { traces: [], sample: trace };
        entry.traces.push(index);
        groups.set(key, entry);
      }
    });
    const shown = figure.layout.showlegend;
    return shown === true || (shown !== false && groups.size > 1) ? Array.from(groups.values()) : [];
  }

  /* Add a legend under a figure: it wraps as the page is wide, which plotly's own scrolls instead. */
  function addLegend(chart, entries) {
    const legend = document.createElement("div");
    legend.className = "legend";
    const hidden = new Set();

    function show() {
      const visible = chart.data.map(() => true);
      for (const entry of entries) {
        entry.button.setAttribute("aria-pressed", String(!hidden.has(entry)));
        for (const index of entry.traces) {
          visible[index] = hidden.has(entry) ? "legendonly" : true;
        }
      }
      Plotly.restyle(chart, { visible: visible });
    }

    for (const entry of entries) {
      entry.button = document.createElement("button");
      entry.button.type = "button";
      entry.button.setAttribute("aria-pressed", "true");
      entry.button.append(sampleOf(entry.sample), plainText(entry.sample.name));
      entry.button.addEventListener("click", function () {
        if (!hidden.delete(entry)) {
          hidden.add(entry);
        }
        show();
      });
      entry.button.addEventListener("dblclick", function () {
        const others = entries.filter((each) => each !== entry);
        const isAlone = others.every((each) => hidden.has(each));
        hidden.clear();
        if (!isAlone) {
          others.forEach((each) => hidden.add(each));
        }
        show();
      });
      legend.append(entry.button);
    }
    chart.after(legend);
  }

  /* What figures show for a name with entities, which plotly reads. */
  function plainText(name) {
    const reader = document.createElement("textarea");
    reader.innerHTML = name;
    return reader.value;
  }

  const DASHES = { dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" };
  const SYMBOLS = { diamond: "M11 1L16 6L11 11L6 6Z", "line-ew-open": "M4 6H18" };

  /* A small picture of a trace: its line, its mark, or the colour of its bars. */
  function sampleOf(trace) {
    const picture = svg("svg", { width: 22, height: 12, "aria-hidden": "true" });
    const marker = trace.marker || {};
    if (trace.type === "bar") {
      picture.append(svg("rect", { x: 8, width: 12, height: 12, fill: marker.color, opacity: marker.opacity || 1 }));
      return picture;
    }
    const line = trace.line || {};
    const colour = line.color || marker.color;
    if (trace.mode.includes("lines")) {
      const look = { stroke: colour, "stroke-width": line.width, "stroke-dasharray": DASHES[line.dash] || "none" };
      picture.append(svg("path", { d: "M0 6H22", ...look }));
    }
    if (trace.mode.includes("markers")) {
      const shape = SYMBOLS[marker.symbol] || SYMBOLS.diamond;
      picture.append(svg("path", { d: shape, fill: colour, stroke: colour, "stroke-width": 2 }));
    }
    return picture;
  }

  function svg(name, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) {
      element.setAttribute(key, value);
    }
    return element;
  }

  /* Leave out the texts of cells that are too narrow for them. */
  function fitCells(chart) {
    chart.data.forEach(function (trace, index) {
      if (trace.type === "heatmap") {
        const words = figures[chart.id].texts = figures[chart.id].texts || trace.texttemplate;
        const shown = chart._fullLayout._size.w / trace.x.length < 52 ? "" : words;
        if (shown !== trace.texttemplate) {
          Plotly.restyle(chart, { texttemplate: shown }, [index]);
        }
      }
    });
  }

  let resizing = 0;
  window.addEventListener("resize", function () {
    clearTimeout(resizing);
    resizing = setTimeout(function () {
      document.querySelectorAll(".chart.js-plotly-plot").forEach(fitCells);
    }, 300);
  });

  /* Plot the figures of open folders one after the other, so that the first can be used while others follow. */
  const queue = [];

  function plotVisible(folder) {
    const isIdle = queue.length === 0;
    for (const chart of folder.querySelectorAll(".chart:not(.js-plotly-plot)")) {
      if (chart.offsetParent !== null && !queue.includes(chart)) {
        queue.push(chart);
      }
    }
    root.dataset.ready = String(queue.length === 0);
    if (isIdle) {
      plotNext();
    }
  }

  function plotNext() {
    if (queue.length > 0) {
      plot(queue[0]);
      queue.shift();
      root.dataset.ready = String(queue.length === 0);
      setTimeout(plotNext, 0);
    }
  }

  function move(chart, target) {
    let [start, end] = chart.layout.xaxis.range.map(Number);
    const width = end - start;
    const data = target.dataset;
    if (data.start !== undefined) {
      [start, end] = [Number(data.start), Number(data.end)];
    } else if (data.shift !== undefined) {
      [start, end] = [start + data.shift * width, end + data.shift * width];
    } else {
      const centre = (start + end) / 2;
      [start, end] = [centre - (width * data.zoom) / 2, centre + (width * data.zoom) / 2];
    }
    const update = {};
    for (const key of Object.keys(chart.layout)) {
      if (/^xaxis\d*$/.test(key)) {
        update[key + ".range"] = [start, end];
      }
    }
    Plotly.relayout(chart, update);
  }

  for (const views of document.querySelectorAll(".views")) {
    views.addEventListener("click", function (event) {
      if (event.target.tagName === "BUTTON") {
        move(document.getElementById(views.dataset.figure), event.target);
      }
    });
  }
  for (const folder of document.querySelectorAll("details")) {
    folder.addEventListener("toggle", function () {
      if (folder.open) {
        plotVisible(folder);
      }
    });
  }
  button.addEventListener("click", function () {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    applyTheme();
  });
  preference.addEventListener("change", applyTheme);
  applyTheme();
  plotVisible(document);
})();
