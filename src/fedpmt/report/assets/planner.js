"use strict";

// The planner of `fedpmt plan`, in the page: the same rules on the same prices. A test holds both together.

const RESOURCES = ["operations", "time", "bytes", "upload", "memory", "energy"];

/** What one local round of a depth takes on a kind of device. */
function usageOf(prices, kind, depth, steps) {
  const epochs = prices.epochs * (steps / prices.all_steps);
  const passes = depth.whole ? 1 : Math.min(epochs, 1);
  const amount = ([each, once]) => epochs * each + passes * once;
  const training = amount(depth.seconds) / kind.speed;
  const down = kind.downlink === null ? 0 : depth.download_bytes / kind.downlink;
  const up = kind.uplink === null ? 0 : depth.upload_bytes / kind.uplink;
  const energy = kind.watts === null ? 0 : kind.watts[0] * training + kind.watts[1] * (down + up);
  return {
    operations: amount(depth.operations),
    time: training + (down + up),
    bytes: depth.download_bytes + depth.upload_bytes,
    upload: depth.upload_bytes,
    memory: depth.memory_bytes,
    energy,
    training,
    down,
    up,
  };
}

/** The last place in a list that fits; where none does, the first. */
function largest(items, fits) {
  for (let place = items.length - 1; place > 0; place -= 1) if (fits(items[place], place)) return place;
  return 0;
}

/** The first of so many places at which something holds that holds from then on; their number where it never does. */
function firstPlace(count, holds) {
  let [low, high] = [0, count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** One planning of kinds of devices: what each trains under a deadline, after which replies are dropped or not. */
class Planning {
  constructor(prices, choice, depths, kinds, deadline, latest) {
    Object.assign(this, { prices, choice, depths, kinds, deadline, latest });
    this.every = prices.all_steps;
    this.within = (value, limit) => value <= limit * (1 + prices.rounding);
    this.rows = kinds.map((kind) => this.row(kind));
  }

  get byDeadline() {
    const budget = this.choice.budget;
    return this.prices.assign === "deadline" && (budget === null || budget.amounts.length === 0);
  }

  get trades() {
    return this.choice.plan !== "paper";
  }

  usage(kind, place, steps = this.every) {
    return usageOf(this.prices, kind, this.depths[place], steps);
  }

  memory(kind) {
    return kind.memory === null ? Infinity : kind.memory;
  }

  /** Whether a device can train a depth in time and in memory. */
  fits(kind, place) {
    const inTime = this.within(this.usage(kind, place).time, this.deadline);
    return inTime && this.depths[place].memory_bytes <= this.memory(kind);
  }

  /** What a device may spend. */
  grant(kind) {
    const level = this.prices.assign === "level";
    const limit = Object.fromEntries(RESOURCES.map((name) => [name, Infinity]));
    if (!level) limit.memory = this.memory(kind);
    const planned = level ? kind.level - 1 : largest(this.depths, (_, place) => this.fits(kind, place));
    const budget = this.choice.budget;
    if (budget === null) {
      const room = level ? null : { ...limit, time: this.deadline };
      limit.operations = this.usage(kind, planned).operations;
      return { limit, room: room || limit, planned, budgeted: false };
    }
    const { resource, amounts } = budget;
    if (amounts.length === 0) {
      limit[resource] = Math.min(limit[resource], this.usage(kind, planned)[resource]);
      return { limit, room: limit, planned, budgeted: true };
    }
    const [value, absolute] = amounts[amounts.length > 1 ? kind.level - 1 : 0];
    const most = absolute ? value : value * this.usage(kind, this.depths.length - 1)[resource];
    limit[resource] = Math.min(limit[resource], most);
    return { limit, room: limit, planned: null, budgeted: true };
  }

  inside(usage, limit) {
    return RESOURCES.every((name) => this.within(usage[name], limit[name]));
  }

  /** The most steps of a depth that are within a limit. */
  affordable(kind, place, limit) {
    return firstPlace(this.every, (steps) => !this.inside(this.usage(kind, place, steps + 1), limit));
  }

  get wanted() {
    if (!this.trades) return this.every;
    return Math.max(1, Math.ceil(this.choice.share * this.every * (1 - this.prices.rounding)));
  }

  /** The depth that a device trains, and in how many steps. */
  choose(kind, grant) {
    if (this.trades) {
      const place = largest(this.depths, (_, one) => this.affordable(kind, one, grant.room) >= this.wanted);
      return [place, Math.max(1, this.affordable(kind, place, grant.room))];
    }
    if (grant.planned !== null && !grant.budgeted) return [grant.planned, this.every];
    const parts = grant.planned === null ? this.depths : this.depths.slice(0, grant.planned + 1);
    return [largest(parts, (_, one) => this.inside(this.usage(kind, one), grant.limit)), this.every];
  }

  row(kind) {
    const grant = this.grant(kind);
    const [place, steps] = this.choose(kind, grant);
    const depth = this.depths[place];
    const usage = this.usage(kind, place, steps);
    const able = this.trades || grant.budgeted ? this.inside(usage, grant.room) : this.fits(kind, place);
    const fits = able && this.within(usage.time, this.latest);
    const deeper = place + 1 < this.depths.length ? place + 1 : null;
    const frozen = this.prices.layers.filter((_, one) => !depth.trained[one]);
    return {
      name: kind.name,
      level: kind.level,
      devices: kind.devices,
      speed: kind.speed,
      depth: place + 1,
      frozen,
      trains_from: this.prices.layers[depth.trained.indexOf(true)],
      seconds: usage.time,
      joules: kind.watts === null ? null : usage.energy,
      fits,
      binds: fits ? this.binds(kind, grant, deeper) : this.outside(kind, grant, place, steps, false),
      upload_bytes: depth.upload_bytes,
      download_bytes: depth.download_bytes,
      memory_bytes: depth.memory_bytes,
      ratio: depth.ratio,
      steps,
      all_steps: this.every,
      deeper_steps: deeper === null ? null : this.affordable(kind, deeper, grant.room),
      usage,
    };
  }

  /** What keeps a device that takes part from the next deeper part. */
  binds(kind, grant, deeper) {
    if (deeper === null) return [];
    if (this.prices.assign === "level" && this.choice.budget === null) return ["level"];
    return this.outside(kind, grant, deeper, this.wanted, true);
  }

  /** The limits that a depth exceeds in these steps. */
  outside(kind, grant, place, steps, granted) {
    const usage = this.usage(kind, place, steps);
    const found = [];
    const planned = this.byDeadline ? this.deadline : Infinity;
    const end = granted ? planned : Math.min(planned, this.latest);
    if (!this.within(usage.time, end)) {
      const slow = !this.within(usage.training, end);
      found.push(slow ? "time" : usage.up >= usage.down ? "upload" : "download");
    }
    const held = !granted || this.prices.assign === "deadline" ? this.memory(kind) : Infinity;
    if (usage.memory > held) found.push("memory");
    const budget = this.choice.budget;
    if (budget !== null) {
      const beyond = grant.planned !== null && place > grant.planned && budget.amounts.length === 0;
      const exceeded = !this.within(usage[budget.resource], grant.limit[budget.resource]);
      if (!beyond && exceeded && !found.includes(budget.resource)) found.push(budget.resource);
    }
    return found;
  }

  /** ψ of those that take part, as shares of all devices. */
  get psi() {
    const all = this.rows.reduce((sum, row) => sum + row.devices, 0);
    return this.depths.reduce((sum, _, place) => {
      const reach = this.rows
        .filter((row) => row.fits && row.depth > place)
        .reduce((devices, row) => devices + row.devices, 0);
      return sum + (reach > 0 ? all / reach : Infinity);
    }, 0);
  }

  /** The smallest deadline that keeps every device in; null where none does. */
  get leastDeadline() {
    if (this.byDeadline) {
      const need = this.depths[0].memory_bytes;
      if (this.kinds.some((kind) => this.memory(kind) < need)) return null;
      const steps = this.trades && this.choice.budget === null ? 1 : this.every;
      return Math.max(...this.kinds.map((kind) => this.usage(kind, 0, steps).time));
    }
    const late = ["time", "upload", "download"];
    const out = this.rows.some((row) => !row.fits && row.binds.some((name) => !late.includes(name)));
    return out ? null : Math.max(...this.rows.map((row) => row.seconds));
  }

  gains(other) {
    return other.rows.filter((then, place) => {
      const now = this.rows[place];
      return then.fits && (then.depth > now.depth || !now.fits);
    });
  }

  step(amount, other) {
    const gains = this.gains(other);
    if (gains.length === 0) return null;
    const [first] = gains;
    const same = gains.filter((row) => row.name === first.name && row.level === first.level);
    return {
      amount,
      name: first.name || `level ${first.level}`,
      devices: same.reduce((sum, row) => sum + row.devices, 0),
      trains_from: first.trains_from,
      psi: finite(other.psi),
    };
  }

  /** The next larger deadline with which some device trains more. */
  moreTime() {
    if (!this.byDeadline) return null;
    const steps = [this.every, this.wanted, ...(this.trades ? [1] : [])];
    const ends = this.kinds.flatMap((kind) =>
      this.depths.flatMap((_, place) => steps.map((one) => this.usage(kind, place, one).time)),
    );
    const now = this.deadline * (1 + 2 * this.prices.rounding);
    const found = [...new Set(ends)].filter((end) => end > now).sort((one, other) => one - other);
    const at = (end) => this.with(this.kinds, end, Math.max(end, this.latest));
    const place = firstPlace(found.length, (one) => this.gains(at(found[one])).length > 0);
    return place === found.length ? null : this.step(found[place], at(found[place]));
  }

  /** The kind of device that trains more with the least additional memory. */
  moreMemory() {
    if (!this.byDeadline) return null;
    let [least, best] = [Infinity, null];
    this.kinds.forEach((kind, place) => {
      this.depths.forEach(({ memory_bytes: need }) => {
        const more = need - this.memory(kind);
        if (more <= 0 || more >= least) return;
        const kinds = this.kinds.map((one, other) => (other === place ? { ...kind, memory: need } : one));
        const step = this.step(need, this.with(kinds, this.deadline, this.latest));
        if (step !== null) [least, best] = [more, step];
      });
    });
    return best;
  }

  with(kinds, deadline, latest) {
    return new Planning(this.prices, this.choice, this.depths, kinds, deadline, latest);
  }
}

/** The tightest deadline that leaves nobody out and lets the fastest kind of device train everything. */
function tightestDeadline(prices, depths) {
  const seconds = (kind, depth) => usageOf(prices, kind, depth, prices.all_steps).time;
  const slowest = Math.max(...prices.kinds.map((kind) => seconds(kind, depths[0])));
  for (const depth of [...depths].reverse()) {
    const able = prices.kinds.filter((kind) => kind.memory === null || depth.memory_bytes <= kind.memory);
    if (able.length > 0) return Math.max(slowest, Math.min(...able.map((kind) => seconds(kind, depth))));
  }
  return Math.max(slowest, Math.min(...prices.kinds.map((kind) => seconds(kind, depths[0]))));
}

function finite(value) {
  return Number.isFinite(value) ? value : null;
}

/** The plan for a choice of deadline, budget, precision and plan: what `fedpmt plan --json` prints. */
function planFleet(prices, choice) {
  const { depths, full } = prices.prices.find(
    (one) => one.precision === choice.precision && one.frozen_precision === choice.frozen_precision,
  );
  const latest = choice.deadline === null ? Infinity : choice.deadline;
  const fitted = prices.assign === "deadline" && choice.deadline === null;
  const deadline = fitted ? tightestDeadline(prices, depths) : latest;
  const planning = new Planning(prices, choice, depths, prices.kinds, deadline, latest);
  const { rows } = planning;
  const taking = rows.filter((row) => row.fits);
  const least = planning.leastDeadline;
  const common = { deadline: finite(deadline), fitted, devices: rows, least_deadline: least };
  if (taking.length === 0) {
    const soonest = Math.min(...rows.map((row) => row.seconds));
    return { ...common, error: true, soonest };
  }
  const reached = taking.reduce((best, row) => (row.depth > best.depth ? row : best));
  const slowest = Math.max(...prices.kinds.map((kind) => usageOf(prices, kind, full, prices.all_steps).time));
  return {
    ...common,
    error: false,
    psi: finite(planning.psi),
    uncovered: reached.frozen,
    round_seconds: Math.min(latest, Math.max(...rows.map((row) => row.seconds))),
    fedavg_round_seconds: Math.min(latest, slowest),
    more_time: planning.moreTime(),
    more_memory: planning.moreMemory(),
    trainers: prices.layers.map((_, layer) =>
      taking
        .filter((row) => depths[row.depth - 1].trained[layer])
        .reduce((sum, row) => sum + row.devices, 0),
    ),
  };
}

// What follows shows it.

const shown = {
  number: (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
  count: (value) => value.toLocaleString("en"),
  devices: (value) => `${shown.count(value)} ${value === 1 ? "device" : "devices"}`,
  seconds: (value) => `${value >= 1 ? shown.number(value, 1) : Number(value.toPrecision(3))} s`,
  deadline: (value) => {
    const digits = Math.max(1, 2 - Math.floor(Math.log10(value)));
    return `${Number((Math.ceil(value * 10 ** digits * (1 - 1e-9)) / 10 ** digits).toFixed(digits))}`;
  },
  memory: (bytes) => {
    if (bytes < 2 ** 10) return `${Math.round(bytes)} B`;
    const mebi = bytes / 2 ** 20;
    const [amount, unit] = mebi >= 0.1 ? [mebi, "MiB"] : [bytes / 2 ** 10, "KiB"];
    return `${shown.number(amount, amount >= 100 ? 0 : amount >= 10 ? 1 : 2)} ${unit}`;
  },
  scaled: (value, units) => {
    let place = 0;
    for (; Math.abs(value) >= 1000 && place + 1 < units.length; place += 1) value /= 1000;
    return `${shown.number(value, units[place] === "B" ? 0 : 1)} ${units[place]}`;
  },
  bytes: (value) => shown.scaled(value, ["B", "kB", "MB", "GB", "TB"]),
  joules: (value) => shown.scaled(value, ["J", "kJ", "MJ"]),
  name: (row) => row.name || `level ${row.level}`,
  list: (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]),
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const LIMITS = {
  time: "computing time",
  upload: "its uplink",
  download: "its downlink",
  memory: "memory",
  level: "its level",
  operations: "the operations budget",
  bytes: "the traffic budget",
  energy: "the energy budget",
};

function limitOf(row) {
  if (row.fits && row.binds.length === 0) return "trains every layer";
  const names = shown.list(row.binds.map((name) => LIMITS[name]));
  return row.fits ? `limited by ${names}` : `takes no part: ${names}`;
}

/** The plan in sentences. */
function sentencesOf(prices, choice, plan) {
  const all = prices.kinds.reduce((sum, kind) => sum + kind.devices, 0);
  if (plan.error) {
    const least = plan.devices.some((row) => row.binds.some((name) => ["time", "upload", "download"].includes(name)))
      ? ` The fastest needs ${shown.deadline(plan.soonest)} s.`
      : "";
    return [`No device can take part.${least}`];
  }
  const taking = plan.devices.filter((row) => row.fits).reduce((sum, row) => sum + row.devices, 0);
  const depths = plan.depths;
  const said = [
    `${shown.count(taking)} of ${shown.devices(all)} take part. A round takes ${shown.seconds(plan.round_seconds)}, ` +
      `with FedAvg ${shown.seconds(plan.fedavg_round_seconds)}.`,
  ];
  if (plan.uncovered.length > 0) said.push(`No device trains ${shown.list(plan.uncovered)}: ψ is infinite.`);
  else if (plan.psi <= depths * (1 + prices.rounding))
    said.push(`ψ is ${depths}, its smallest value: every device trains every layer, as with FedAvg.`);
  else {
    const psi = `ψ is ${Number(plan.psi.toPrecision(3))}, and ${depths} if every device trained every layer`;
    said.push(
      choice.plan === "paper"
        ? `${psi}: in theory, the error after the same number of rounds is about ` +
            `${Number((plan.psi / depths).toPrecision(3))} times as large.`
        : `${psi}. What it says of the error holds for equal steps, which this plan does not give.`,
    );
  }
  if (plan.fitted)
    said.push(
      `The deadline of ${shown.deadline(plan.deadline)} s is the tightest that leaves nobody out and lets the fastest ` +
        "device train everything.",
    );
  else if (plan.least_deadline === null) said.push("No deadline keeps every device in: some lack memory or budget.");
  else said.push(`The smallest deadline that keeps every device in is ${shown.deadline(plan.least_deadline)} s.`);
  const bought = ({ devices, name, trains_from: layer, psi }) =>
    `${shown.count(devices)} of ${name} ${devices === 1 ? "trains" : "train"} from ${layer} on` +
    (psi === null ? "." : `, and ψ falls to ${Number(psi.toPrecision(3))}.`);
  if (plan.more_time) said.push(`With a deadline of ${shown.deadline(plan.more_time.amount)} s, ${bought(plan.more_time)}`);
  if (plan.more_memory) {
    const { amount, name } = plan.more_memory;
    said.push(`With ${shown.memory(amount)} of memory on ${name}, ${bought(plan.more_memory)}`);
  }
  return said;
}

const PLANS = {
  paper: "Shown is the paper's plan: each device trains the deepest part that it can train on all of its samples.",
  traded: "Shown is the traded plan: each device trains the deepest part that leaves it the chosen share of its steps.",
  rotated:
    "Shown is the rotated plan: the traded one, and now and then a device trains all layers that it has the memory for.",
};

/** The flags that make `fedpmt plan` print what the page shows, in addition to those the page was made with. */
function flagsOf(start, choice) {
  const flags = [];
  if (choice.deadline !== start.deadline)
    flags.push(choice.deadline === null ? "(without --deadline)" : `--deadline ${choice.deadline}`);
  if (choice.budget?.text !== start.budget?.text)
    flags.push(choice.budget === null ? "(without --budget)" : `--budget ${choice.budget.text}`);
  if (choice.precision !== start.precision) flags.push(`--precision ${choice.precision}`);
  if (choice.frozen_precision !== start.frozen_precision) flags.push(`--frozen-precision ${choice.frozen_precision}`);
  if (choice.plan !== start.plan) flags.push(`--plan ${choice.plan}`);
  if (choice.plan !== "paper" && choice.share !== start.share) flags.push(`--set fedpmt.share=${choice.share}`);
  return flags;
}

function showFleet(prices, plan, place) {
  const line = plan.deadline;
  const longest = Math.max(line || 0, ...plan.devices.map((row) => row.seconds)) * 1.04;
  const percent = (seconds) => `${(100 * seconds) / longest}%`;
  const items = plan.devices.map((row) => {
    const { training, down, up } = row.usage;
    const track = element(
      "div",
      { class: row.fits ? "track" : "track out", "aria-hidden": "true" },
      element("span", { class: "bar training", style: { width: percent(training) } }),
      element("span", { class: "bar link", style: { width: percent(down + up) } }),
      line === null ? null : element("span", { class: "line", style: { left: percent(line) } }),
    );
    const steps = row.steps < row.all_steps ? ` in ${row.steps} of ${row.all_steps} steps` : "";
    const energy = row.joules === null ? "" : `, ${shown.joules(row.joules)}`;
    return element(
      "li",
      {},
      element("span", { class: "who" }, element("b", {}, shown.name(row)), ` × ${shown.count(row.devices)}`),
      element("span", { class: "what" }, `depth ${row.depth}, from ${row.trains_from}${steps}`),
      track,
      element("span", { class: "time" }, shown.seconds(row.seconds)),
      element("span", { class: row.fits ? "limit" : "limit out" }, limitOf(row)),
      element("span", { class: "more" }, `${shown.memory(row.memory_bytes)}, ${shown.bytes(row.upload_bytes)} up${energy}`),
    );
  });
  place.replaceChildren(...items);
}

function showLayers(prices, plan, place) {
  const all = prices.kinds.reduce((sum, kind) => sum + kind.devices, 0);
  const items = prices.layers.map((name, layer) => {
    const devices = plan.error ? 0 : plan.trainers[layer];
    const shade = devices === 0 ? 0 : devices === all ? 5 : Math.ceil((4 * devices) / all);
    const text = devices === 0 ? "nobody" : `${shown.count(devices)} of ${shown.count(all)}`;
    return element("li", { class: `shade-${shade}` }, element("b", {}, name), element("span", {}, text));
  });
  place.replaceChildren(...items);
}

function showTable(plan, place) {
  const rows = plan.devices.map((row) => {
    const cells = [
      shown.count(row.devices),
      Number(row.speed.toPrecision(3)).toString(),
      row.depth,
      row.trains_from,
      `${row.steps} of ${row.all_steps}`,
      shown.seconds(row.seconds),
      shown.bytes(row.upload_bytes),
      shown.memory(row.memory_bytes),
      limitOf(row),
    ];
    const first = element("th", { scope: "row" }, shown.name(row));
    return element("tr", {}, first, ...cells.map((cell) => element("td", {}, `${cell}`)));
  });
  place.replaceChildren(...rows);
}

/** Ties the controls to the plan. */
class Page {
  constructor(prices, start) {
    Object.assign(this, { prices, start, choice: { ...start } });
    this.find = (name) => document.getElementById(name);
    const first = prices.prices[0].depths;
    const ends = (depth) => prices.kinds.map((kind) => usageOf(prices, kind, depth, prices.all_steps).time);
    const given = start.deadline === null ? [] : [start.deadline];
    this.low = Math.min(0.7 * Math.min(...ends(first[0])), ...given);
    this.high = Math.max(1.2 * Math.max(...ends(first.at(-1))), ...given);
    this.prepare();
    this.listen();
    this.find("app").hidden = false;
    this.show();
  }

  prepare() {
    const options = (name, values) =>
      this.find(name).replaceChildren(...values.map(([value, text]) => element("option", { value }, text)));
    const of = (key) => [...new Set(this.prices.prices.map((one) => one[key]))].map((name) => [name, name]);
    options("precision", of("precision"));
    options("frozen", of("frozen_precision"));
    const energy = this.prices.kinds[0].watts !== null;
    const resources = RESOURCES.filter((name) => energy || name !== "energy");
    const given = this.start.budget;
    options("resource", [
      ["", "none"],
      ...(given === null ? [] : [["given", `as given: ${given.text}`]]),
      ...(this.prices.mode === "exact" ? resources.map((name) => [name, name]) : []),
    ]);
    this.find("free-label").textContent =
      this.prices.assign === "deadline" ? "Fit the deadline to the fleet" : "No deadline";
    this.set();
  }

  /** Give the controls the values of the choice. */
  set() {
    const { choice, find } = this;
    find("free").checked = choice.deadline === null;
    find("precision").value = choice.precision;
    find("frozen").value = choice.frozen_precision;
    find("plan").value = choice.plan;
    find("share").value = Math.round(100 * choice.share);
    const given = this.start.budget;
    find("resource").value = choice.budget === null ? "" : choice.budget === given ? "given" : choice.budget.resource;
    if (choice.budget === null) find("amount").value = 50;
  }

  listen() {
    const { find } = this;
    const on = (name, act) =>
      find(name).addEventListener("input", () => {
        act(find(name));
        this.show();
      });
    on("deadline", ({ value }) => {
      const seconds = this.low * (this.high / this.low) ** (value / 1000);
      this.choice.deadline = Number(seconds.toPrecision(3));
    });
    on("seconds", ({ valueAsNumber }) => {
      if (valueAsNumber > 0) this.choice.deadline = valueAsNumber;
    });
    on("free", ({ checked }) => {
      this.choice.deadline = checked ? null : this.shownDeadline();
    });
    on("precision", ({ value }) => (this.choice.precision = value));
    on("frozen", ({ value }) => (this.choice.frozen_precision = value));
    on("plan", ({ value }) => (this.choice.plan = value));
    on("share", ({ valueAsNumber }) => (this.choice.share = valueAsNumber / 100));
    on("resource", () => this.budget());
    on("amount", () => this.budget());
    find("everybody").addEventListener("click", () => {
      this.choice.deadline = Number(shown.deadline(this.plan.least_deadline));
      this.show();
    });
    find("reset").addEventListener("click", () => {
      this.choice = { ...this.start };
      this.set();
      this.show();
    });
  }

  budget() {
    const resource = this.find("resource").value;
    const share = this.find("amount").valueAsNumber / 100;
    if (resource === "") this.choice.budget = null;
    else if (resource === "given") this.choice.budget = this.start.budget;
    else this.choice.budget = { resource, amounts: [[share, false]], text: `${resource}=${share}` };
  }

  shownDeadline() {
    return this.plan.deadline === null ? Number(this.high.toPrecision(3)) : Number(shown.deadline(this.plan.deadline));
  }

  show() {
    const { prices, choice, find } = this;
    this.plan = planFleet(prices, choice);
    this.plan.depths = prices.prices[0].depths.length;
    this.showControls();
    const [headline, ...others] = sentencesOf(prices, choice, this.plan);
    find("headline").textContent = headline;
    find("words").replaceChildren(...others.map((text) => element("li", {}, text)));
    find("shown-plan").textContent = PLANS[choice.plan];
    find("result").classList.toggle("warning", this.plan.error || this.plan.uncovered.length > 0);
    showFleet(prices, this.plan, find("fleet-bars"));
    showLayers(prices, this.plan, find("layer-cells"));
    showTable(this.plan, find("rows"));
    const flags = flagsOf(this.start, choice);
    find("flags").textContent = flags.length === 0 ? "nothing was changed" : flags.join(" ");
  }

  showControls() {
    const { choice, find, plan } = this;
    const seconds = plan.deadline;
    find("deadline").disabled = find("seconds").disabled = choice.deadline === null;
    if (seconds !== null) {
      const place = (1000 * Math.log(seconds / this.low)) / Math.log(this.high / this.low);
      if (document.activeElement !== find("deadline")) find("deadline").value = place;
      if (document.activeElement !== find("seconds")) find("seconds").value = shown.deadline(seconds);
    }
    const text = seconds === null ? "no deadline" : `${shown.deadline(seconds)} seconds`;
    find("deadline").setAttribute("aria-valuetext", text);
    find("everybody").disabled = plan.least_deadline === null;
    const custom = !["", "given"].includes(find("resource").value);
    find("amount").disabled = !custom;
    const share = `${find("amount").value} % of what the whole model takes`;
    find("amount-text").textContent = custom ? share : "";
    find("amount").setAttribute("aria-valuetext", custom ? share : "not used");
    find("share").disabled = choice.plan === "paper";
    const steps = choice.plan === "paper" ? "" : `${find("share").value} % of the steps or more`;
    find("share-text").textContent = steps;
    find("share").setAttribute("aria-valuetext", steps || "not used");
  }
}

if (document.getElementById("prices")) {
  const { prices, choice } = JSON.parse(document.getElementById("prices").textContent);
  window.planner = new Page(prices, choice);
}
